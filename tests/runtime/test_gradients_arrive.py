"""Gradients arrive at every parameter that has one, whatever crosses stages and is read beside."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.partition import stages
from launcher.partition.assignment import PlanError

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
TWO_STAGES = launcher.UniformStageOption(num_stages=2)
# XLA:CPU aborts at types of fewer than 8 bits; e8m0 and fnuz lack numbers, and 64 bits are off.
LEFT_OUT = re.compile(r"\D[246](_|$)|e8m0|fnuz|128|[^x]64")
SCALARS = [x for x in vars(jnp).values() if isinstance(x, type(jnp.float32))]
KINDS = {x.dtype.name: x for x in SCALARS if not LEFT_OUT.search(x.dtype.name)}


def parameters(seed=0):
    draw = np.random.default_rng(seed)
    return {k: jnp.asarray(draw.normal(size=(8, 8)) / 4, jnp.float32) for k in "ab"}


def descending(loss, value_and_grad):
    """A step that moves the first of two networks, and lets the second one follow."""

    def step(state, x):
        value, grads = value_and_grad(lambda net: loss(net, state, x))(state[0])
        net = jax.tree.map(lambda w, g: w - 0.5 * g, state[0], grads)
        return (net, jax.tree.map(lambda t, w: 0.9 * t + 0.1 * w, state[1], net)), value

    return step


def equal_to_one_device(loss, method):
    state = parameters(0), parameters(1)
    wanted = jax.jit(descending(loss, jax.value_and_grad))(state, X)
    step = launcher.parallelize(
        descending(loss, launcher.value_and_grad),
        method=method,
        devices=jax.devices()[:4],
        donate_argnums=(),
    )
    for a, b in zip(jax.tree.leaves(step(state, X)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    return jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), wanted[0][0], state[0])


def crossing(kind):
    """A loss in two stages between which an array of this type crosses."""
    is_complex = jnp.issubdtype(kind, jnp.complexfloating)

    def loss(net, state, x):
        h = jnp.tanh(x @ net["a"])
        h = (h * (1 + 1j)).astype(kind) if is_complex else h.astype(kind)
        launcher.mark_pipeline_boundary()
        wide = jnp.real(h) if is_complex else h.astype(jnp.float32)
        return jnp.mean((wide @ net["b"] - x) ** 2)

    return loss


@pytest.mark.parametrize("name", KINDS)
def test_through_whatever_type_crosses_stages(name):
    kind = KINDS[name]
    try:
        jax.jit(jax.grad(lambda net: crossing(kind)(net, None, X)))(parameters())
    except (TypeError, ValueError, jax.errors.JaxRuntimeError) as error:
        pytest.skip(f"one device does not compute it, either: {error}"[:120])
    method = launcher.PipeshardParallel(2, stage_option=TWO_STAGES)
    moved = equal_to_one_device(crossing(kind), method)
    assert (moved["a"] > 0) == jnp.issubdtype(kind, jnp.inexact)


def forward(net, x):
    h = jnp.tanh(x @ net["a"])
    launcher.mark_pipeline_boundary()
    return h @ net["b"]


PROGRAMS = {
    "target network": lambda net, state, x: jnp.mean(
        (forward(net, x) - 0.9 * jnp.tanh(forward_alone(state[1], x))) ** 2
    ),
    "the same one, stopped": lambda net, state, x: jnp.mean(
        (forward(net, x) - forward_alone(jax.lax.stop_gradient(net), x) - x) ** 2
    ),
    "itself as a constant": lambda net, state, x: jnp.mean(
        (forward(net, x) - forward_alone(state[0], x) - x) ** 2
    ),
    "one array unread": lambda net, state, x: jnp.mean(
        (forward({**net, "b": state[1]["b"]}, x) - x) ** 2
    ),
    "tied arrays": lambda net, state, x: jnp.mean((forward({**net, "b": net["a"].T}, x) - x) ** 2),
}
METHODS = {
    "data": launcher.DataParallel,
    "zero2": launcher.Zero2Parallel,
    "zero3": launcher.Zero3Parallel,
    "shard": lambda count: launcher.ShardParallel(count, (2, 2)),
    "three_d": lambda count: launcher.ThreeDParallel(2, 1, 2, count),
    "stages": lambda count: launcher.PipeshardParallel(count, stage_option=TWO_STAGES),
}


def forward_alone(net, x):
    return jnp.tanh(x @ net["a"]) @ net["b"]


@pytest.mark.parametrize(
    ("name", "method", "count"),
    [
        pytest.param(*case, marks=() if case[1] in ("zero3", "stages") else by_hand)
        for k, case in enumerate(itertools.product(PROGRAMS, METHODS, (1, 2)))
        for by_hand in [pytest.mark.stress if k % 5 else pytest.mark.slow]
    ],
)
def test_with_other_arrays_read_beside_the_differentiated_ones(name, method, count):
    moved = equal_to_one_device(PROGRAMS[name], METHODS[method](count))
    assert moved["a"] > 0
    assert (moved["b"] > 0) == (name not in ("one array unread", "tied arrays"))


def test_a_gradient_that_stages_would_lose_is_an_error(monkeypatch):
    """As it was lost when only floating-point arrays were taken to have derivatives."""
    monkeypatch.setattr(stages, "has_tangent", lambda aval: aval.dtype == jnp.float32)
    step = launcher.parallelize(
        descending(crossing(jnp.complex64), launcher.value_and_grad),
        method=launcher.PipeshardParallel(2, stage_option=TWO_STAGES),
        devices=jax.devices()[:4],
    )
    with pytest.raises(
        PlanError, match=r"would lose the gradient of 0\[0\]\.a|would lose the grad"
    ):
        step((parameters(0), parameters(1)), X)
