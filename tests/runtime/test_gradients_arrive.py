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


def parameters(seed=0, names="ab"):
    draw = np.random.default_rng(seed)
    return {k: jnp.asarray(draw.normal(size=(8, 8)) / 4, jnp.float32) for k in names}


def descending(loss, value_and_grad):
    """A step that moves the first of two networks, and lets the second one follow."""

    def step(state, x):
        value, grads = value_and_grad(lambda net: loss(net, state, x))(state[0])
        net = jax.tree.map(lambda w, g: w - 0.5 * g, state[0], grads)
        return (net, jax.tree.map(lambda t, w: 0.9 * t + 0.1 * w, state[1], net)), value

    return step


def equal_to_one_device(loss, method, names="ab"):
    state = parameters(0, names), parameters(1, names)
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


def crossing(names):
    """A loss in two stages between which an array of each of these types crosses."""

    def narrow(h, kind):
        is_complex = jnp.issubdtype(kind, jnp.complexfloating)
        return (h * (1 + 1j)).astype(kind) if is_complex else h.astype(kind)

    def loss(net, state, x):
        crossed = [narrow(jnp.tanh(x @ net[name]), KINDS[name]) for name in names]
        launcher.mark_pipeline_boundary()
        wide = (jnp.real(h).astype(jnp.float32) for h in crossed)
        return sum(jnp.mean((h @ net["b"] - x) ** 2) for h in wide)

    return loss


def computed_by_one_device(name):
    step = jax.jit(jax.grad(lambda net: crossing([name])(net, None, X)))
    try:
        step.lower(parameters(0, [name, "b"])).compile()
    except (TypeError, ValueError, jax.errors.JaxRuntimeError):
        return False
    return True


def test_through_whatever_types_cross_stages():
    names = [name for name in KINDS if computed_by_one_device(name)]
    assert len(names) > 10
    method = launcher.PipeshardParallel(2, stage_option=TWO_STAGES)
    moved = equal_to_one_device(crossing(names), method, [*names, "b"])
    for name in names:
        assert (moved[name] > 0) == jnp.issubdtype(KINDS[name], jnp.inexact), name


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


@pytest.mark.sampled(23)
@pytest.mark.parametrize(
    ("name", "method", "count"), [*itertools.product(PROGRAMS, METHODS, (1, 2))]
)
def test_with_other_arrays_read_beside_the_differentiated_ones(name, method, count):
    moved = equal_to_one_device(PROGRAMS[name], METHODS[method](count))
    assert moved["a"] > 0
    assert (moved["b"] > 0) == (name not in ("one array unread", "tied arrays"))


def test_a_gradient_that_stages_would_lose_is_an_error(monkeypatch):
    """As it was lost when only floating-point arrays were taken to have derivatives."""
    monkeypatch.setattr(stages, "has_tangent", lambda aval: aval.dtype == jnp.float32)
    names = "complex64", "b"
    step = launcher.parallelize(
        descending(crossing(["complex64"]), launcher.value_and_grad),
        method=launcher.PipeshardParallel(2, stage_option=TWO_STAGES),
        devices=jax.devices()[:4],
    )
    with pytest.raises(PlanError, match=r"would lose the gradient of 0\S+complex64"):
        step((parameters(0, names), parameters(1, names)), X)
