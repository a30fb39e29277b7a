"""A script as a user writes it: `python a_script.py HOW`. It ends without `launcher.shutdown`.

HOW: `own` trains its own classes on two workers, and fails at the end; `joined` runs on the Ray
that it has started itself.
"""

import dataclasses
import sys
import typing

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray
from flax import linen as nn
from flax.training import train_state
from sets_devices import layer

import launcher
from launcher.testing import assert_allclose

HOW = sys.argv[1]
if HOW == "joined":
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
launcher.init("ray", num_nodes=2, num_devices_per_node=2)
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
STAGES = launcher.UniformStageOption(2)


class State(train_state.TrainState):
    batch_stats: typing.Any
    key: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    x: jax.Array
    scale: float = dataclasses.field(default=2.0, metadata={"static": True})


class Metrics(typing.NamedTuple):
    loss: jax.Array
    examples: jax.Array


@jax.custom_vjp
def halved(x):
    return x


halved.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jax.checkpoint(layer)(halved(nn.Dense(8)(x)))
        launcher.mark_pipeline_boundary()
        x = nn.Dropout(0.25, deterministic=False)(x)
        return nn.Dense(4)(x)


net = Net()
tx = optax.chain(optax.add_noise(0.01, 0.55, jax.random.key(1)), optax.adam(1e-2))


def init(key):
    params = net.init({"params": key, "dropout": key}, X)["params"]
    stats = {"mean": jnp.zeros(4)}
    return State.create(apply_fn=net.apply, params=params, tx=tx, batch_stats=stats, key=key)


def step(state, batch):
    key, dropout = jax.random.split(state.key)

    def loss(params, batch):
        out = state.apply_fn({"params": params}, batch.x, rngs={"dropout": dropout})
        return batch.scale * jnp.mean((out - batch.x) ** 2)

    value, grads = launcher.value_and_grad(loss)(state.params, batch)
    stats = jax.tree.map(lambda mean: 0.9 * mean + batch.x.mean(0), state.batch_stats)
    state = state.apply_gradients(grads=grads).replace(key=key, batch_stats=stats)
    return state, Metrics(value, jnp.array(len(batch.x)))


def serial(count):
    state, losses = jax.jit(init)(jax.random.key(0)), []
    for _ in range(count):
        state, metrics = jax.jit(step)(state, Batch(X))
        losses.append(metrics.loss)
    return state, losses


def own():
    """One microbatch, cut along the model axis: dropout draws what it draws on one device."""
    stages = launcher.UniformStageOption(2, logical_mesh_shape=(1, 2))
    method = launcher.PipeshardParallel(num_micro_batches=1, stage_option=stages)
    train = launcher.parallelize(step, method=method)
    state, losses, total = train.create(init, jax.random.key(0), like=Batch(X)), [], 0
    for _ in range(3):
        state, metrics = train(state, Batch(X))
        losses.append(metrics.loss)
        total += metrics.loss
    expected_state, expected = serial(3)
    assert type(state) is State
    assert type(metrics) is Metrics
    assert_allclose(losses, expected)
    assert_allclose(jax.tree.leaves(state), jax.tree.leaves(expected_state), rtol=1e-4, atol=1e-6)
    assert_allclose(total, sum(expected))
    assert np.mean(losses) < losses[0] + 1
    again = flax.serialization.from_bytes(state.params, flax.serialization.to_bytes(state.params))
    assert_allclose(again, expected_state.params, rtol=1e-4, atol=1e-6)
    print("as on one device", flush=True)
    raise ValueError("on purpose")


def small(weights, x):
    def loss(weights, x):
        h = layer(x @ weights[0])
        launcher.mark_pipeline_boundary()
        return jnp.mean((h @ weights[1] - x) ** 2)

    value, grads = launcher.value_and_grad(loss)(weights, x)
    return weights - 0.1 * grads, value


def run_small():
    method = launcher.PipeshardParallel(num_micro_batches=2, stage_option=STAGES)
    train = launcher.parallelize(small, method=method)
    weights = np.ones((2, 4, 4), np.float32) / 4
    assert_allclose(train(weights, X), jax.jit(small)(weights, X))
    print("as on one device", flush=True)


def joined():
    run_small()
    launcher.shutdown()
    assert ray.get(ray.remote(lambda: 5).remote()) == 5
    sys.exit(3)


{"own": own, "joined": joined}[HOW]()
