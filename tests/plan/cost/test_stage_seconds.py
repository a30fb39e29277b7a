"""Seconds of a plan, computed by hand: links of each axis, transfers, the update."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from random_problems import equal_stages

import launcher
from launcher.partition.assignment import Submesh
from launcher.plan import local_shape, timeline
from launcher.plan.build import PlanBuilder, build_plan
from launcher.plan.inter_op.estimate import make_estimate
from launcher.plan.inter_op.layer_construction import cost_table, make_problem
from launcher.plan.inter_op.layer_table import NOTHING
from launcher.plan.inter_op.stage_cost import StageCosts
from launcher.plan.inter_op.submeshes import Mesh, SearchPoint
from launcher.plan.profile.measure_layers import MeasuredLayers, Timing
from launcher.trace import trace_step

LAYERS, WIDTH, BATCH = 4, 512, 64
HOSTS = dataclasses.replace(  # whose devices share nothing
    local_shape(8, 2, "cpu"),
    effective_parallelism=None,
    intra_host=100e9,
    inter_host=3e9,
    latency=1e-5,
)


def loss(params, x):
    for i in range(LAYERS):
        if i:
            launcher.mark_pipeline_boundary()
        x = jnp.tanh(x @ params[2 * i]) @ params[2 * i + 1]
    return (x**2).mean()


def train(state, x):
    params, momentum = state
    grads = launcher.grad(loss)(params, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum


PARAMS = [
    jax.ShapeDtypeStruct(shape, jnp.float32)
    for _ in range(LAYERS)
    for shape in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
]
TRACED = trace_step(train, ((PARAMS, PARAMS), jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)))


def assignment(*submeshes, turns=1, **changed):
    return equal_stages(submeshes, LAYERS, turns, **changed)


@pytest.mark.parametrize("mesh", [(2, 4), (8, 1), (1, 4)])
def test_a_stage_over_hosts_costs_what_the_search_took_it_to_cost(mesh):
    data, model = mesh
    plan = build_plan(TRACED, assignment(Submesh(tuple(range(data * model)), mesh)), HOSTS)
    table = cost_table(TRACED, HOSTS, (1, 2, 4))
    setting = SearchPoint(4, BATCH, data, "1f1b", (), None)
    row = Mesh.of(data, model, table.index(model, False))
    costs = StageCosts(table, [row], HOSTS, setting, True)
    (stage,) = plan.stages
    passes = costs.passes(0, NOTHING)
    assert stage.forward_seconds == pytest.approx(passes.forward[0, 0, LAYERS], rel=1e-3)
    assert stage.backward_seconds == pytest.approx(passes.backward[0, 0, LAYERS], rel=1e-3)
    once = costs.once(0, NOTHING)
    assert stage.update_seconds == pytest.approx(once[0, 0, LAYERS], rel=1e-3)


def test_replicas_of_two_hosts_send_over_the_one_link_between_them():
    halves = Submesh((0, 1, 2, 3), (4, 1)), Submesh((4, 5, 6, 7), (4, 1))
    plan = build_plan(TRACED, assignment(*halves), HOSTS)
    size = next(t.bytes_per_microbatch for t in plan.transfers if t.src_stage == 0)
    assert size == BATCH // 4 * WIDTH * 4
    first, second = (next(t for t in timeline(plan) if t.task.stage == s) for s in (0, 1))
    assert second.start - first.end == pytest.approx(HOSTS.latency + size / HOSTS.inter_host)
    inside = dataclasses.replace(HOSTS, hosts=1, devices_per_host=8)
    plan = build_plan(TRACED, assignment(*halves), inside)
    first, second = (next(t for t in timeline(plan) if t.task.stage == s) for s in (0, 1))
    wait = HOSTS.latency + size / HOSTS.intra_host / 4  # each on its own
    assert second.start - first.end == pytest.approx(wait)


def test_a_mesh_updates_its_state_once_however_many_stages_it_has():
    cluster = dataclasses.replace(HOSTS, hosts=1, devices_per_host=8)
    meshes = Submesh((0,), (1, 1)), Submesh((1,), (1, 1))
    plain = build_plan(TRACED, assignment(*meshes), cluster)
    turns = assignment(*meshes, turns=2, schedule="interleaved_1f1b")
    several = build_plan(TRACED, turns, cluster)
    for mesh in range(2):
        own = several.stages[mesh].update_seconds + several.stages[mesh + 2].update_seconds
        assert own == pytest.approx(plain.stages[mesh].update_seconds)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_stage_alone_is_as_much_faster_as_its_products_and_its_other_work_are(remat):
    """What the search and the plan say; all cores are used in products, and half in other work."""
    shared = dataclasses.replace(
        local_shape(4, 1, "cpu"), effective_parallelism=2.0, product_parallelism=1.0
    )
    alone = assignment(Submesh((0,), (1, 1)), remat=(remat,))
    (stage,) = build_plan(TRACED, alone, shared).stages
    again = 1 if remat == "full" else 0  # of the forward pass
    products = (3 + again) * 2 * BATCH / 4 * sum(p.size for p in PARAMS) / shared.flops_fp32
    share = products / (stage.forward_seconds + stage.backward_seconds)
    assert stage.effective_parallelism == pytest.approx(2.0 - share, rel=1e-6)
    (found,) = make_estimate(alone, make_problem(TRACED, shared)).stages
    assert found.effective_parallelism == pytest.approx(2.0 - share, rel=0.02)
    assert build_plan(TRACED, alone, HOSTS).stages[0].effective_parallelism is None


def test_updates_on_a_shared_machine_are_started_and_faster_where_devices_idle():
    """One device of four alone takes half of what it takes with all at work."""
    shared = dataclasses.replace(
        local_shape(4, 1, "cpu"), effective_parallelism=2.0, dispatch_overhead=0.25
    )
    one, apart = (
        build_plan(TRACED, assignment(Submesh((0,), (1, 1))), cluster).stages[0].update_seconds
        for cluster in (shared, dataclasses.replace(shared, effective_parallelism=None))
    )
    assert one == pytest.approx((apart + 0.25) / 2)
    every = [Submesh((d,), (1, 1)) for d in range(4)]
    plan = build_plan(TRACED, assignment(*every), shared)
    plain = build_plan(TRACED, assignment(*every), HOSTS)
    rate = HOSTS.memory_bandwidth / shared.memory_bandwidth
    for stage, other in zip(plan.stages, plain.stages, strict=True):
        assert stage.update_seconds == pytest.approx(0.25 + other.update_seconds * rate)


def test_a_stage_that_others_read_is_not_one_that_the_next_alone_reads():
    """They send as many gradients back as read it: other programs, of other memory."""

    def skipping(params, x):
        first = x = jnp.tanh(x @ params[0])
        for i in range(1, LAYERS):
            launcher.mark_pipeline_boundary()
            x = jnp.tanh((x + first) @ params[i])
        return (x**2).mean()

    def step(params, x):
        return launcher.grad(skipping)(params, x)

    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    traced = trace_step(step, (params, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)))
    cluster = dataclasses.replace(HOSTS, hosts=1, devices_per_host=8)

    def with_stages(ends, builder):
        submeshes = tuple(Submesh((s,), (1, 1)) for s in range(len(ends)))
        layers = tuple(
            tuple(range(first, end)) for first, end in zip((0, *ends), ends, strict=False)
        )
        return builder.build(assignment(*submeshes, layers=layers))

    shared = PlanBuilder(traced, cluster)
    with_stages((1, LAYERS), shared)
    found = with_stages((1, 2, 3, 4), shared)
    assert found == with_stages((1, 2, 3, 4), PlanBuilder(traced, cluster))


def test_replicas_of_a_stage_alone_are_summed_beside_what_was_measured():
    """A stage with more replicas than the others sums its gradients in every microbatch."""
    cluster = dataclasses.replace(HOSTS, hosts=1, devices_per_host=8)
    measured = MeasuredLayers((0,) * LAYERS, {(0, 1): Timing(((4, 0.01, 0.02),))}, BATCH)
    wider = assignment(Submesh((0, 1), (2, 1)), Submesh((2,), (1, 1)))
    first, _ = build_plan(TRACED, wider, cluster, measured).stages
    _, own = measured.stage((0, 1), 8, 1)
    sums = sum(c.bytes for c in first.collectives if (c.when, c.axis) == ("backward", "data"))
    assert sums > 0
    ring = sums / cluster.intra_host  # of two devices: half of it twice
    waits = 2 * sum(c.count for c in first.collectives if c.when == "backward") * cluster.latency
    expected = own + ring + waits  # a program starts at once, as it was measured
    assert first.backward_seconds == pytest.approx(expected, rel=1e-3)
