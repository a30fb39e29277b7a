"""Gradients taken by one function and used by another equal the step that does both: in this
process, and (slow) on two workers of two devices, started once for the module."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import launcher
from launcher.plan import PlanError
from launcher.runtime.emit.emit import emit
from launcher.runtime.emit.instructions import Send
from launcher.testing import assert_allclose
from launcher.trace import GradientError

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
METHODS = {
    "data": launcher.DataParallel(num_micro_batches=2),
    "zero2": launcher.Zero2Parallel(),
    "stages": launcher.ThreeDParallel(data=2, pipeline=2, num_micro_batches=4),
}
OPTIMIZERS = {
    "sgd": optax.sgd(1.0),
    "adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
}


def loss(params, x):
    h = jnp.tanh(x @ params["a"])
    launcher.mark_pipeline_boundary()
    return ((h @ params["b"] - x) ** 2).mean()


def functions(optimizer):
    def init(key):
        a, b = jax.random.normal(key, (2, 8, 8)) / 3
        return {"a": a, "b": b}, optimizer.init({"a": a, "b": b})

    def apply(state, grads):
        params, opt_state = state
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def step(state, x):
        value, grads = launcher.value_and_grad(loss)(state[0], x)
        return apply(state, grads), value

    return init, apply, step


def gradients(state, x):
    return launcher.value_and_grad(loss)(state[0], x)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("method", "optimizer", "follows"),
    [*itertools.product(METHODS, OPTIMIZERS, ("gradients", "step"))],
)
def test_gradients_applied_apart_are_the_step(session, method, optimizer, follows):
    init, apply, step = functions(OPTIMIZERS[optimizer])
    whole = launcher.parallelize(step, method=METHODS[method])
    expected = state = whole.create(init, jax.random.key(0), like=X)
    for _ in range(3):
        expected, value = whole(expected, X)
    taken = launcher.parallelize(gradients, method=METHODS[method], donate_argnums=())
    used = launcher.parallelize(apply, method=taken if follows == "gradients" else whole)
    state = whole.create(init, jax.random.key(0), like=X)
    for _ in range(3):
        found, grads = taken(state, X)
        if follows == "step":  # seen, and given back by hand
            grads = jax.tree.map(np.asarray, grads)
        state = used(state, grads)
    assert_allclose(found, value, rtol=1e-6)
    assert_allclose(jax.device_get(state), jax.device_get(expected), rtol=1e-6, atol=1e-6)
    if follows == "step":
        assert list(map(place, jax.tree.leaves(state))) == list(
            map(place, jax.tree.leaves(expected))
        )
    used.warmup(state, grads)


def place(array):
    return array.placement if isinstance(array, launcher.RemoteArray) else array.sharding


def test_a_parameter_is_updated_on_its_stage_and_no_gradient_moves():
    init, apply, _ = functions(OPTIMIZERS["adamw"])
    taken = launcher.parallelize(
        gradients, method=METHODS["stages"], donate_argnums=(), devices=jax.devices()[:4]
    )
    used = launcher.parallelize(apply, method=taken, devices=jax.devices()[:4])
    state = taken.create(init, jax.random.key(0), like=X)
    _, grads = taken(state, X)
    assert [sorted(stage.shardings) for stage in used.plan(state, grads).stages] == [
        ["0.0.a", "1.a"],
        ["0.0.b", "1.b"],
    ]
    params, (_, (adam, *_)) = used(state, grads)
    for name in "ab":
        places = {x[name].sharding for x in (params, grads, adam.mu, adam.nu)}
        assert len(places) == 1
    table = used.executable((params, state[1]), grads)._table
    sent = [x.instruction for x in table.entries if isinstance(x.instruction, Send)]
    slots = emit(used._last.variant.step, used.last_plan).slots
    assert {slots[i].aval.shape for x in sent for i in x.inputs} == {()}


def test_what_follows_nothing_needs_a_loss():
    _, apply, _ = functions(OPTIMIZERS["sgd"])
    state = {"a": X, "b": X}, OPTIMIZERS["sgd"].init({"a": X, "b": X})
    with pytest.raises(GradientError, match=r"launcher\.parallelize\(apply, method=step\)"):
        launcher.parallelize(apply)(state, state[0])
    taken = launcher.parallelize(gradients, devices=jax.devices()[:1])
    with pytest.raises(PlanError, match="no plan to follow yet"):
        launcher.parallelize(apply, method=taken)(state, state[0])


def test_the_plan_of_what_uses_gradients_is_replayed():
    init, apply, _ = functions(OPTIMIZERS["adamw"])
    taken = launcher.parallelize(
        gradients, method=METHODS["stages"], donate_argnums=(), devices=jax.devices()[:4]
    )
    used = launcher.parallelize(apply, method=taken, devices=jax.devices()[:4])
    state = taken.create(init, jax.random.key(0), like=X)
    _, grads = taken(state, X)
    found = json.loads(json.dumps(used.plan(state, grads).to_dict()))
    method = launcher.Replay(launcher.Plan.from_dict(found))
    again = launcher.parallelize(apply, method=method, devices=jax.devices()[:4])
    copy = jax.tree.map(jnp.copy, state)
    replayed, expected = again(copy, grads), used(state, grads)
    jax.tree.map(np.testing.assert_array_equal, replayed, expected)
    assert list(map(place, jax.tree.leaves(replayed))) == list(
        map(place, jax.tree.leaves(expected))
    )
