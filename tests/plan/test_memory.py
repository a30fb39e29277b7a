"""What the memory estimate adds up. That it is near the truth: tests/runtime/test_passes.py."""

import jax
import jax.numpy as jnp
import pytest

import launcher
from launcher.plan.memory import activation_bytes, residual_bytes
from launcher.plan.schedule import make_schedule, max_in_flight
from launcher.plan.sharding.dims import NamedDims
from launcher.plan.sharding.layout import AXES, Layout, outer_dims
from launcher.plan.stages import cut_stages
from launcher.trace import trace_step

WIDTH, ROWS, STAGES, MICRO_BATCHES = 8, 4, 4, 6
BOUNDARY = ROWS * WIDTH * 4


def loss(params, x):
    for i in range(STAGES):
        if i:
            launcher.mark_pipeline_boundary()
        x = jnp.tanh(x @ params[i])
    return (x**2).mean()


@pytest.fixture(scope="module")
def found():
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * STAGES
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return trace_step(lambda p, x: launcher.grad(loss)(p, x), (params, batch))


def one_device(traced):
    one = dict.fromkeys(AXES, 1)
    dims = NamedDims(traced.loss(1).equations)
    return Layout(traced, traced.loss(1), one, {}, outer_dims(traced), dims)


def on_each_mesh(traced, name, meshes, remat):
    found, layout = traced.loss(1), one_device(traced)
    graphs = cut_stages(found, [(i,) for i in range(STAGES)], [i % meshes for i in range(STAGES)])
    tasks = make_schedule(name, STAGES, meshes, MICRO_BATCHES)
    return [
        activation_bytes({g: remat for g in graphs if g.mesh == mesh}, found, tasks[mesh], layout)
        for mesh in range(meshes)
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_what_is_kept_is_kept_for_every_microbatch_in_flight(found, name):
    graph = cut_stages(found.loss(1), [(i,) for i in range(STAGES)])[1]
    in_flight = max_in_flight(make_schedule(name, STAGES, STAGES, MICRO_BATCHES)[1])
    each = BOUNDARY + residual_bytes(graph, found.loss(1), one_device(found))
    assert on_each_mesh(found, name, STAGES, "none")[1] == in_flight * each


def test_full_rematerialisation_keeps_the_boundary(found):
    in_flight = [4, 3, 2, 1]
    kept = on_each_mesh(found, "1f1b", STAGES, "full")
    assert kept[1:] == [n * BOUNDARY for n in in_flight[1:]]
    assert kept[0] == 0  # its input is the batch
    # Between the parts of a backward pass what was computed again is held.
    assert on_each_mesh(found, "zero_bubble", STAGES, "full")[3] > 4 * BOUNDARY


def test_the_stages_of_a_mesh_add_up(found):
    shared = on_each_mesh(found, "interleaved_1f1b", 2, "full")
    tasks = make_schedule("interleaved_1f1b", STAGES, 2, MICRO_BATCHES)
    assert shared[1] == max_in_flight(tasks[1]) * BOUNDARY
    assert 0 < shared[0] < max_in_flight(tasks[0]) * BOUNDARY  # the first stage keeps nothing
