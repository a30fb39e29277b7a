"""Links are resources: what crosses one waits for what crosses it, and takes its time."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.partition.reduction import DEFAULT_REDUCTION
from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.inter_op.problem import Wanted
from launcher.plan.inter_op.select import best_plan
from launcher.plan.links import link_seconds, once_seconds
from launcher.plan.pipeline import Pipeline, estimated, timeline
from launcher.plan.stage_plan import StagePlan, Transfer
from launcher.schedule import (
    SCHEDULES,
    Kind,
    Way,
    make_tasks,
    simulate,
    step_seconds,
    training_schedules,
)
from launcher.trace import trace_step


def cluster_of(hosts, each, **rates):
    known = {"intra_host": 1e10, "inter_host": 1e9, "latency": 1e-5}
    return ClusterShape(
        name="made up",
        hosts=hosts,
        devices_per_host=each,
        device_kind="none",
        peak_flops=None,
        flops=1e12,
        flops_fp32=1e12,
        memory_bandwidth=1e11,
        memory_bytes=None,
        **{**known, **rates},
    )


def stage_of(layer, devices, each, seconds=(1.0, 2.0, 1.0), once=0.0):
    hosts = tuple(sorted({device // each for device in devices}))
    mesh = len(devices), 1
    return StagePlan((layer,), hosts, devices, mesh, "none", *seconds, once, 0, 0, {})


def pipeline_of(cluster, stages, transfers, count, schedule="1f1b"):
    return Pipeline(
        method="manual",
        schedule=schedule,
        num_micro_batches=count,
        stages=tuple(stages),
        transfers=tuple(transfers),
        cluster=vars(cluster),
        reduction=DEFAULT_REDUCTION,
    )


def random_pipeline(rng):
    hosts, each = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2, 4]))
    rates = {name: 10 ** rng.uniform(5, 10) for name in ("intra_host", "inter_host")}
    cluster = cluster_of(hosts, each, **rates, latency=10 ** rng.uniform(-6, -2))
    if rng.random() < 0.3:
        shared = {**vars(cluster), "effective_parallelism": float(rng.uniform(1, hosts * each))}
        cluster = ClusterShape(**shared)
    meshes, used = [], 0
    while not meshes or (used < cluster.num_devices and rng.random() < 0.8):
        size = int(rng.choice([n for n in (1, 2, 3, 4) if n <= cluster.num_devices - used]))
        meshes.append(tuple(range(used, used + size)))
        used += size
    schedule = str(rng.choice(training_schedules()))
    if len(meshes) > 1 and SCHEDULES[schedule].interleaves:
        meshes *= int(rng.integers(1, 4))
    stages = []
    for s, devices in enumerate(meshes):
        forward, backward = rng.uniform(1e-3, 1.0, 2)
        seconds = forward, backward, backward * rng.uniform(0, 0.6)
        stages.append(stage_of(s, devices, each, seconds, once=rng.uniform(0, 0.1)))
    every = itertools.permutations(range(len(meshes)), 2)
    pairs = [(a, b) for a, b in every if abs(a - b) == 1 or rng.random() < 0.2]
    transfers = [
        Transfer(*pair, int(10 ** rng.uniform(3, 8)), int(rng.choice([0, 10 ** rng.uniform(3, 9)])))
        for pair in pairs
        if meshes[pair[0]] != meshes[pair[1]]
    ]
    return pipeline_of(cluster, stages, transfers, int(rng.integers(1, 17)), schedule)


def seconds_by_host(pipeline):
    """What every host sends, and what it receives, at its link's rate: from bytes alone."""
    busy = collections.Counter()
    for one in pipeline.transfers:
        size = one.bytes_per_microbatch * pipeline.num_micro_batches + one.bytes_per_step
        ends = [pipeline.stages[s].hosts for s in (one.src_stage, one.dst_stage)]
        if not set(ends[0]) & set(ends[1]):
            for end, way in zip(ends, ("out", "into"), strict=True):
                for host in end:
                    busy[way, host] += size / len(end) / pipeline.cluster["inter_host"]
    return busy


@pytest.mark.parametrize("seeds", [range(n, n + 100) for n in range(0, 500, 100)])
def test_no_prediction_is_below_what_a_link_or_a_device_takes_alone(seeds):
    for seed in seeds:
        pipeline = random_pipeline(np.random.default_rng(seed))
        predicted = estimated(pipeline).predicted_step_seconds * (1 + 1e-9)
        assert predicted >= max(link_seconds(pipeline).values(), default=0.0), seed
        assert predicted >= max(seconds_by_host(pipeline).values(), default=0.0), seed
        if pipeline.cluster["effective_parallelism"] is None:  # else one alone is faster
            busy = [pipeline.num_micro_batches * each for each in pipeline.mesh_seconds]
            for mesh, stage in zip(pipeline.mesh_of, pipeline.stages, strict=True):
                busy[mesh] += stage.update_seconds
            assert predicted >= max(busy), seed


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager_1f1b", "zero_bubble"])
def test_a_slow_link_sets_the_pace_under_every_schedule(schedule):
    """64 microbatches of a byte over a link of a byte a second, in either direction by itself."""
    tasks = make_tasks(schedule, 2, 2, 64)
    ways = {(0, 1): Way(("out", "in"), 1.0), (1, 0): Way(("back",), 1.0)}
    length = step_seconds(simulate(tasks, lambda task: 0.001, ways))
    assert length > 64.0
    if schedule == "gpipe":  # all go forward, then all come back
        assert length == pytest.approx(128, rel=0.01)


def test_transfers_of_one_link_follow_one_another_and_others_do_not_wait():
    """Stages 0 and 1 are on one host and send to two others at the same time."""
    tasks = make_tasks("gpipe", 3, 3, 1)
    shared = {(0, 1): Way((), 0.0), (0, 2): Way(("host 0",), 3.0), (1, 2): Way(("host 0",), 2.0)}
    apart = {**shared, (1, 2): Way(("host 1",), 2.0)}

    def starts(ways):
        timed = simulate(tasks, lambda task: 1.0, ways)
        return [t.start for t in timed if t.task.kind is Kind.FORWARD]

    assert starts(shared) == [0.0, 1.0, 1 + 3 + 2]  # behind what has skipped stage 1
    assert starts(apart) == [0.0, 1.0, 4.0]


def test_what_several_stages_share_crosses_once_a_step():
    """A tied embedding and its gradient, in both directions at once."""
    cluster = cluster_of(2, 1, inter_host=1e6)
    stages = [stage_of(0, (0,), 1), stage_of(1, (1,), 1)]
    tied = [Transfer(0, 1, 1000, 5_000_000), Transfer(1, 0, 1000, 5_000_000)]
    plain = [Transfer(0, 1, 1000, 0), Transfer(1, 0, 1000, 0)]
    whole, without = (pipeline_of(cluster, stages, sent, 4) for sent in (tied, plain))
    assert once_seconds(whole) == pytest.approx(5.0, rel=1e-3)
    more = estimated(whole).predicted_step_seconds - estimated(without).predicted_step_seconds
    assert more == pytest.approx(5.0, rel=1e-3)
    assert [t.end for t in timeline(whole)] == [t.end for t in timeline(without)]


@pytest.mark.parametrize(("inter_host", "devices"), [(1e5, 2), (1e11, 4)])
def test_a_host_behind_a_slow_link_is_left_idle(inter_host, devices):
    """Where what would cross takes longer than what the other host saves."""

    def loss(params, x):
        for i, w in enumerate(params):
            if i:
                launcher.mark_pipeline_boundary()
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def step(params, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, launcher.grad(loss)(params, x))

    params = [jax.ShapeDtypeStruct((256, 256), "float32")] * 4
    traced = trace_step(step, (params, jax.ShapeDtypeStruct((4096, 256), "float32")))
    cluster = cluster_of(2, 2, inter_host=inter_host, intra_host=1e11, latency=1e-7)
    plan = best_plan(traced, cluster, Wanted())
    assert plan.num_devices == devices
    assert plan.predicted_step_seconds >= max(link_seconds(plan).values(), default=0.0)
