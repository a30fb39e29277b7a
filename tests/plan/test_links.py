"""Links are resources: what crosses one waits for what crosses it, and takes its time."""

import collections
import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import random_problems
from layered import layered_step
from random_problems import equal_stages

from launcher.hardware.cluster_shape import ClusterShape
from launcher.partition.assignment import DEFAULT_REDUCTION, Submesh
from launcher.plan.build import build_plan
from launcher.plan.cost.stage_seconds import links_of
from launcher.plan.inter_op.estimate import make_estimate
from launcher.plan.inter_op.explain import reason
from launcher.plan.inter_op.layer_construction import make_problem
from launcher.plan.inter_op.problem import Constraints
from launcher.plan.inter_op.select import search
from launcher.plan.pipeline import (
    Pipeline,
    estimated,
    half_width,
    link_seconds,
    once_seconds,
    timeline,
)
from launcher.plan.stage_plan import RingSeconds, StagePlan, Transfer
from launcher.schedule import (
    SCHEDULES,
    Kind,
    Route,
    make_tasks,
    simulate,
    step_seconds,
    training_schedules,
)


@pytest.mark.parametrize(
    ("kind", "meshes", "model", "within"),
    [
        ("H100-SXM5-80GB", 1, 1, 0.06),
        ("NVIDIA A100-SXM4-80GB", 1, 1, 0.06),  # as JAX names it
        ("NVIDIA H100 80GB HBM3", 1, 8, 0.14),
        ("A100-SXM4-40GB", 2, 1, 0.14),
        ("GH200-HBM3-96GB", 1, 1, 0.16),
        ("NVIDIA RTX A1000", 1, 1, 0.16),
        ("cpu", 2, 1, 0.25),
    ],
)
def test_predictions_are_less_certain_of_cut_layers_and_other_devices(kind, meshes, model, within):
    stages = [SimpleNamespace(logical_mesh=(1, model))] * meshes
    pipeline = SimpleNamespace(cluster={"device_kind": kind}, meshes=stages, stages=stages)
    assert half_width(pipeline) == pytest.approx(within)


def cluster_of(hosts, each, **rates):
    known = {"intra_host": 1e10, "inter_host": 1e9, "latency": 1e-5}
    known |= {"flops": 1e12, "flops_fp32": 1e12, "memory_bandwidth": 1e11}
    return random_problems.cluster_of(hosts, each, **known | rates)


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


def with_rings(stage, mesh, cluster, rng):
    """Add collectives of random sizes to a stage's passes and its update.

    Returns:
        The stage; and the bytes that each of its devices sends along data and model in a
        microbatch's passes, and once a step.
    """
    data, model = mesh
    links = links_of(Submesh(stage.devices, mesh), cluster)
    each = {
        "data": 10 ** rng.uniform(3, 8) if data > 1 else 0.0,
        "model": 10 ** rng.uniform(3, 8) if model > 1 else 0.0,
        "once": 10 ** rng.uniform(3, 9) if data > 1 else 0.0,
    }
    rings = RingSeconds(each["model"] / links.model, each["data"] / links.data)
    summed = each["once"] / links.data
    hidden = summed * rng.uniform(0, 1)
    stage = dataclasses.replace(
        stage,
        logical_mesh=mesh,
        forward_seconds=stage.forward_seconds + rings.model,
        backward_seconds=stage.backward_seconds + rings.data,
        update_seconds=stage.update_seconds + summed - hidden,
        hidden_seconds=hidden,
        pass_rings=rings,
        once_rings=RingSeconds(data=summed),
    )
    return stage, each


def random_pipeline(rng):
    """Return a pipeline; and of every stage what its devices send in collectives."""
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
    shapes = {of: (len(of) // m, m) for of in meshes for m in (1, 2) if len(of) % m == 0}
    stages, sent = [], []
    for s, devices in enumerate(meshes):
        forward, backward = rng.uniform(1e-3, 1.0, 2)
        seconds = forward, backward, backward * rng.uniform(0, 0.6)
        stage = stage_of(s, devices, each, seconds, once=rng.uniform(0, 0.1))
        stage, of_stage = with_rings(stage, shapes[devices], cluster, rng)
        stages.append(stage)
        sent.append(of_stage)
    every = itertools.permutations(range(len(meshes)), 2)
    pairs = [(a, b) for a, b in every if abs(a - b) == 1 or rng.random() < 0.2]
    transfers = [
        Transfer(*pair, int(10 ** rng.uniform(3, 8)), int(rng.choice([0, 10 ** rng.uniform(3, 9)])))
        for pair in pairs
        if meshes[pair[0]] != meshes[pair[1]]
    ]
    return pipeline_of(cluster, stages, transfers, int(rng.integers(1, 17)), schedule), sent


def ring_bytes(stage, each, data, model):
    """What crosses between hosts in the rings of a stage, `each` devices to a host."""
    sent, along = collections.Counter(), stage.logical_mesh[1]
    for at, device in enumerate(stage.devices):
        row = at // along * along
        for size, to in (
            (data, (at + along) % len(stage.devices)),
            (model, row + (at + 1 - row) % along),
        ):
            hosts = device // each, stage.devices[to] // each
            if hosts[0] != hosts[1]:
                sent["out", hosts[0]] += size
                sent["into", hosts[1]] += size
    return sent


def seconds_by_host(pipeline, sent):
    """What every host sends, and what it receives, at its link's rate: from bytes alone.

    Args:
        pipeline: the pipeline.
        sent: of every stage the bytes that a device sends along data and along model in a step.
    """
    busy = collections.Counter()
    each, rate = (pipeline.cluster[name] for name in ("devices_per_host", "inter_host"))
    for stage, of_stage in zip(pipeline.stages, sent, strict=True):
        for end, size in ring_bytes(stage, each, *of_stage).items():
            busy[end] += size / rate
    for one in pipeline.transfers:
        size = one.bytes_per_microbatch * pipeline.num_micro_batches + one.bytes_per_step
        ends = [pipeline.stages[s].hosts for s in (one.src_stage, one.dst_stage)]
        if not set(ends[0]) & set(ends[1]):
            for end, way in zip(ends, ("out", "into"), strict=True):
                for host in end:
                    busy[way, host] += size / len(end) / rate
    return busy


@pytest.mark.parametrize("seeds", [range(n, n + 100) for n in range(0, 500, 100)])
def test_no_prediction_is_below_what_a_link_or_a_device_takes_alone(seeds):
    for seed in seeds:
        pipeline, each = random_pipeline(np.random.default_rng(seed))
        count = pipeline.num_micro_batches
        sent = [(count * of["data"] + of["once"], count * of["model"]) for of in each]
        if pipeline.cluster["effective_parallelism"] is not None:  # what computes moves the bytes
            sent = [(0.0, 0.0)] * len(sent)
        predicted = estimated(pipeline).predicted_step_seconds * (1 + 1e-9)
        assert predicted >= max(link_seconds(pipeline).values(), default=0.0), seed
        assert predicted >= max(seconds_by_host(pipeline, sent).values(), default=0.0), seed
        if pipeline.cluster["effective_parallelism"] is None:  # else one alone is faster
            busy = [pipeline.num_micro_batches * each for each in pipeline.mesh_seconds]
            for mesh, stage in zip(pipeline.mesh_of, pipeline.stages, strict=True):
                busy[mesh] += stage.update_seconds
            assert predicted >= max(busy), seed


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager_1f1b", "zero_bubble"])
def test_a_slow_link_sets_the_pace_under_every_schedule(schedule):
    """64 microbatches of a byte over a link of a byte a second, in either direction by itself."""
    tasks = make_tasks(schedule, 2, 2, 64)
    ways = {(0, 1): Route(("out", "in"), 1.0), (1, 0): Route(("back",), 1.0)}
    length = step_seconds(simulate(tasks, lambda task: 0.001, ways))
    assert length > 64.0
    if schedule == "gpipe":  # all go forward, then all come back
        assert length == pytest.approx(128, rel=0.01)


def test_transfers_of_one_link_follow_one_another_and_others_do_not_wait():
    """Stages 0 and 1 are on one host and send to two others at the same time."""
    tasks = make_tasks("gpipe", 3, 3, 1)
    shared = {
        (0, 1): Route((), 0.0),
        (0, 2): Route(("host 0",), 3.0),
        (1, 2): Route(("host 0",), 2.0),
    }
    apart = {**shared, (1, 2): Route(("host 1",), 2.0)}

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


def traced(layers=4, width=256, rows=4096):
    """A step that trains layers with as many parameters."""
    return layered_step([(width, width)] * layers, rows, updated=range(layers))


def sent_in_rings(plan):
    """Of every stage the bytes that a device sends along data and along model in a step."""
    found = []
    for stage in plan.stages:
        sent = {"data": 0.0, "model": 0.0}
        lengths = dict(zip(("data", "model"), stage.logical_mesh, strict=True))
        for one in stage.collectives:
            times = 2 if one.kind == "all-reduce" else 1
            times *= 1 if one.when == "update" else plan.num_micro_batches
            sent[one.axis] += times * one.bytes * (1 - 1 / lengths[one.axis])
        found.append((sent["data"], sent["model"]))
    return found


FAST = {"flops": 1e15, "flops_fp32": 1e15, "memory_bandwidth": 1e15, "intra_host": 1e13}


@pytest.mark.parametrize(
    ("hosts", "each", "devices", "zero", "rows", "count"),
    [
        # What sums the gradients of either stage, once a step, leaves host 1.
        pytest.param(3, 2, ((0, 1, 2), (3, 4, 5)), 0, 96, 4, id="sums"),
        # Each host has a device of either stage, whose passes gather.
        pytest.param(2, 2, ((0, 2), (1, 3)), 3, 64, 4, id="gathers"),
        # Activations leave the hosts that passes gather on.
        pytest.param(4, 1, ((0, 1), (2, 3)), 3, 4096, 16, id="both"),
    ],
)
def test_collectives_and_transfers_of_a_host_share_its_link(
    hosts, each, devices, zero, rows, count
):
    step, cluster = traced(rows=rows), cluster_of(hosts, each, **FAST, latency=1e-9)
    submeshes = tuple(Submesh(of, (len(of), 1)) for of in devices)
    assignment = equal_stages(submeshes, 4, zero=(zero,) * 2, num_micro_batches=count)
    plan = build_plan(step, assignment, cluster)
    needed = max(seconds_by_host(plan, sent_in_rings(plan)).values())
    assert needed <= plan.predicted_step_seconds < 1.2 * needed
    estimate = make_estimate(assignment, make_problem(step, cluster))
    assert estimate.predicted_step_seconds == pytest.approx(plan.predicted_step_seconds, rel=2e-3)


def test_the_busiest_link_of_a_runner_up_counts_collectives():
    """ZeRO-3 on hosts of its own, and on hosts that the meshes share."""
    step, cluster = traced(rows=64), cluster_of(2, 2, **FAST, latency=1e-9)
    apart, shared = (
        build_plan(
            step, equal_stages(tuple(Submesh(of, (2, 1)) for of in meshes), 4, zero=(3, 3)), cluster
        )
        for meshes in [((0, 1), (2, 3)), ((0, 2), (1, 3))]
    )
    busiest = [max(link_seconds(plan).values()) for plan in (shared, apart)]
    words = "its busiest link takes {:.3g} s a step, not {:.3g}"
    assert reason(shared, apart) == words.format(*busiest)


def random_assignment(rng, cluster):
    """Equal submeshes, in order, side by side or at random, with one or two of the stages each."""
    model = int(rng.choice([m for m in (1, 2) if m <= cluster.devices_per_host]))
    data = int(rng.choice([n for n in (1, 2, 4) if n * model <= cluster.num_devices]))
    size = data * model
    count = min(int(rng.integers(1, 4)), cluster.num_devices // size)
    order = np.arange(count * size)
    given = [
        order.reshape(count, size),
        order.reshape(size, count).T,
        rng.permutation(cluster.num_devices)[: count * size].reshape(count, size),
    ][rng.integers(3)].tolist()
    turns = int(rng.integers(1, 3)) if count > 1 else 1
    return equal_stages(
        tuple(Submesh(tuple(devices), (data, model)) for devices in given),
        6,
        turns,
        num_micro_batches=count * int(rng.choice([1, 2, 4])),
        schedule="interleaved_1f1b" if turns > 1 else str(rng.choice(["gpipe", "1f1b"])),
        zero=tuple(int(rng.choice([0, 2, 3])) for _ in range(count * turns)),
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seeds", [range(n, n + 20) for n in range(0, 60, 20)])
def test_no_plan_is_predicted_below_what_its_own_bytes_take(seeds):
    """Sums over replicas, ZeRO, meshes that share hosts, stages that take turns."""
    step = traced(6, 64, 192)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        rates = {"inter_host": 10 ** rng.uniform(5, 9), "latency": 1e-7}
        cluster = cluster_of(int(rng.integers(2, 5)), int(rng.choice([1, 2, 3])), **rates)
        plan = build_plan(step, random_assignment(rng, cluster), cluster)
        predicted = plan.predicted_step_seconds * (1 + 1e-9)
        needed = seconds_by_host(plan, sent_in_rings(plan))
        assert predicted >= max(needed.values(), default=0.0), seed
        assert predicted >= max(link_seconds(plan).values(), default=0.0), seed


@pytest.mark.parametrize(("inter_host", "devices"), [(1e5, 2), (1e11, 4)])
def test_a_host_behind_a_slow_link_is_left_idle(inter_host, devices):
    """Where what would cross takes longer than what the other host saves."""
    cluster = cluster_of(2, 2, inter_host=inter_host, intra_host=1e11, latency=1e-7)
    plan = search(traced(), cluster, Constraints())[0][0]
    assert plan.num_devices == devices
    assert plan.predicted_step_seconds >= max(link_seconds(plan).values(), default=0.0)
