"""Memory that the update of a step takes beside the state and the gradients."""

import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import launcher
from launcher.plan import build, local_shape
from launcher.plan.cost.mesh_memory import UpdateMemory, mesh_memory
from launcher.plan.methods import DataParallel, PipeshardParallel, ShardParallel, Zero2Parallel
from launcher.trace import trace_step

sys.path.append(str(Path(__file__).parents[2] / "runtime"))
import scanned

WIDTH, LAYERS, BATCH = 16, 4, 8
GRADIENTS = LAYERS * WIDTH * WIDTH * 4


def loss(params, x):
    for i, w in enumerate(params):
        if i:
            launcher.mark_pipeline_boundary()
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def traced(update, donated=(0,)):
    def step(state, x):
        params, kept = state
        value, grads = launcher.value_and_grad(loss)(params, x)
        updates, kept = update.update(grads, kept, params)
        return (optax.apply_updates(params, updates), kept), value

    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    state = params, jax.eval_shape(update.init, params)
    return trace_step(step, (state, batch), donate_argnums=donated)


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def squared(by):
    """An update that multiplies each gradient, as a matrix, by itself."""
    return optax.stateless(lambda grads, _: jax.tree.map(lambda g: -by * (g @ g), grads))


@pytest.mark.parametrize(
    ("update", "on_gpu", "stored"),
    [
        (CLIPPED, False, LAYERS),  # all squares are there before the first is summed
        (CLIPPED, True, 0),
        (optax.adam(1e-3), False, 0),
        (squared(0.1), True, 1),
    ],
    ids=["a norm, as soon as it can", "a norm in order", "element-wise", "products in order"],
)
def test_what_the_update_stores(update, on_gpu, stored):
    share = UpdateMemory(traced(update), on_gpu).share
    assert share * LAYERS == pytest.approx(stored, abs=0.02)


def planned(step, method, devices=1):
    return method.plan(step, local_shape(devices, 1, "cpu"))


def around(method, devices=1, update=CLIPPED, donated=(0,)):
    """The memory of a plan in which nothing but parameters has any size to speak of, in units of
    the parameters'."""
    (stage,) = planned(traced(update, donated), method, devices).stages
    return stage.memory_bytes / GRADIENTS


@pytest.mark.parametrize(
    ("method", "devices", "units"),
    [
        # Parameters, two averages, gradients and their squares.
        (ShardParallel(2, (1, 1)), 1, 5),
        # Gradients of each replica, and their sums.
        (DataParallel(2), 2, 5),
        # Half of the averages; gradients, packed as well; half of their sums, packed as well.
        (Zero2Parallel(2), 2, 1 + 1 + 2 + 1),
        # Gradients of the only microbatch, packed, and half of their sums.
        (Zero2Parallel(1), 2, 1 + 1 + 2.5),
    ],
    ids=["one device", "replicas", "scattered", "scattered, one microbatch"],
)
def test_what_is_there_around_the_update(method, devices, units):
    assert around(method, devices) == pytest.approx(units, rel=0.15)


def test_what_is_not_donated_is_there_twice():
    """Gradients make room for the new parameters; nothing does for new averages."""
    kept = around(ShardParallel(2, (1, 1)), update=optax.adam(1e-3), donated=())
    assert kept == pytest.approx(4 + 2, rel=0.05)


@pytest.mark.parametrize("stages", [1, 2])
def test_memory_is_that_of_the_pieces(stages, monkeypatch):
    """A pass takes the temporaries of a piece, and the tied parameter has two accumulators."""

    def step(params, x):
        grads = launcher.grad(scanned.loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = jax.eval_shape(scanned.params_of, jax.random.key(0))
    batch = jax.ShapeDtypeStruct(scanned.BATCHES[0].shape, jnp.float32)
    opened = trace_step(step, (params, batch), batch_argnums=(1,)).opened
    method = PipeshardParallel(2, stage_option=launcher.UniformStageOption(stages))
    asked = {}

    def recorded(pieces, mesh, footprints, *rest):
        asked[mesh] = pieces, footprints
        return mesh_memory(pieces, mesh, footprints, *rest)

    monkeypatch.setattr(build, "mesh_memory", recorded)
    plan = planned(opened, method, stages)
    assert len(plan.stages) == len(asked) == stages
    for pieces, footprints in asked.values():
        assert len(footprints) == len(pieces.cut.stages) > stages
    tied = Counter(i for i, _ in pieces.cut.update.grad_parts)
    assert max(tied.values()) == 2
