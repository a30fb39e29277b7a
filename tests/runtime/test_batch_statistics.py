"""Batch norm, in linen and NNX, by every method: running averages, counters and the training."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import normed
import numpy as np
import optax
import pytest

import launcher
from launcher.trace import BatchError

ROWS, ROUNDS = 32, 3
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(ROWS, 8)), "y": RNG.normal(size=(ROWS, 2))}
BATCH = {name: x.astype(np.float32) for name, x in BATCH.items()}
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
SEVERAL = {
    "three_d": launcher.ThreeDParallel(data=2, pipeline=2, num_micro_batches=2),
    "data": launcher.DataParallel(num_micro_batches=2),
    "zero3": launcher.Zero3Parallel(num_micro_batches=2),
    "shard": launcher.ShardParallel(num_micro_batches=2, logical_mesh_shape=(2, 2)),
    "auto": launcher.PipeshardParallel(num_micro_batches=2, stage_option="auto"),
}


def model_of(kind, marked):
    options = {"kind": kind, "input_size": 8, "width": 4, "dropout": 0.0, "marked": marked}
    return normed.build(SimpleNamespace(**options), "fp32")


def training(model):
    def init(key):
        params, state = model.init(key)
        return {"params": params, "state": state, "opt": OPTIMIZER.init(params)}

    def step_by(loss, value_and_grad):
        def step(state, batch):
            with_aux = value_and_grad(loss, has_aux=True)
            out, grads = with_aux(state["params"], state["state"], batch, jax.random.key(0))
            value, (_, new) = out
            updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "state": new, "opt": opt}, value

        return step

    return init, step_by


def averaged(loss, slices):
    """The loss of each slice by itself, and what they return, averaged."""

    def over_slices(params, state, batch, key):
        parts = {name: x.reshape(slices, -1, x.shape[-1]) for name, x in batch.items()}
        found = jax.vmap(lambda part: loss(params, state, part, key))(parts)
        return jax.tree.map(lambda x: x.mean(0).astype(x.dtype), found)

    return over_slices


def check(kind, method):
    """The training by a method is that on one device; a stage's state lives on its devices."""
    model = model_of(kind, True)
    init, step_by = training(model)
    step = launcher.parallelize(
        step_by(model.loss, launcher.value_and_grad), method=method, devices=jax.devices()[:4]
    )
    state = step.create(init, jax.random.key(0), like=BATCH)
    plan = step.last_plan
    slices = plan.num_micro_batches * plan.stages[0].logical_mesh[0]
    alone = jax.jit(step_by(averaged(model.loss, slices), jax.value_and_grad))
    expected, homes = init(jax.random.key(0)), jax.tree.map(lambda x: x.sharding, state)
    for _ in range(ROUNDS):
        (state, value), (expected, wanted) = step(state, BATCH), alone(expected, BATCH)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert jax.tree.map(lambda x: x.sharding, state) == homes
    stages = [set(stage.devices) for stage in plan.stages]
    for leaf in jax.tree.leaves(state["state"]):
        assert {d.id for d in leaf.devices()} in stages
    sizes = [x.size for x in jax.tree.leaves(expected["params"])]
    assert plan.num_parameters == sum(sizes)
    assert int(max(jax.tree.leaves(state["state"]), key=lambda x: x.dtype == jnp.int32)) == ROUNDS


@pytest.mark.sampled(10)
@pytest.mark.parametrize("method", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_running_averages_are_means_over_the_slices(kind, method):
    check(kind, method)


def test_what_is_not_marked_is_refused_in_several_slices():
    model = model_of("linen", False)
    step = training(model)[1](model.loss, launcher.value_and_grad)
    state = jax.eval_shape(training(model)[0], jax.random.key(0))
    with pytest.raises(
        BatchError, match=r"joins examples.* or mark the function with launcher.per_"
    ):
        launcher.parallelize(step, method=SEVERAL["data"]).plan(state, BATCH)
