"""Models of several libraries and train steps in the shape of Flax's examples: images, graphs,
policies, networks with state."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from filled import filled
from flax import nnx
from flax.training import train_state
from programs.pieces import (
    CLASSES,
    HIDDEN,
    WIDTH,
    batch,
    descended,
    net,
    of_loss,
)
from programs.program import ROWS, Program, one_microbatch_only, table_test

import launcher

SIDE = 4
BATCH_NORM = one_microbatch_only("joins examples")


def images(k):
    rng = np.random.default_rng(k)
    size = np.linspace(0.2, 2, ROWS)[:, None, None, None]
    return {
        "image": (size * rng.normal(size=(ROWS, SIDE, SIDE, 2))).astype(np.float32),
        "label": np.sort(rng.integers(0, 3, ROWS)).astype(np.int32),
    }


# -- linen -----------------------------------------------------------------------------------------


class ResNet(nn.Module):
    """Convolutions, batch norm and a skip connection, as the ImageNet example's."""

    @nn.compact
    def __call__(self, x, train=True):
        def norm(x):
            return nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)

        x = nn.relu(norm(nn.Conv(4, (3, 3), use_bias=False)(x)))
        launcher.mark_pipeline_boundary()
        x = nn.relu(x + norm(nn.Conv(4, (3, 3), use_bias=False)(x)))
        return nn.Dense(3)(x.mean((1, 2)))


class TrainState(train_state.TrainState):
    """With the statistics of batch norm."""

    batch_stats: dict


def imagenet():
    """The mean, with the weights' decay in the loss, and new statistics beside the logits."""
    model, tx = ResNet(), optax.sgd(0.05, momentum=0.9, nesterov=True)

    def init():
        shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), images(0)["image"]))
        return TrainState.create(apply_fn=model.apply, tx=tx, **filled(shapes))

    def build(value_and_grad):
        def step(state, batch):
            def loss_fn(params):
                variables = {"params": params, "batch_stats": state.batch_stats}
                logits, new = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
                one_hot = jax.nn.one_hot(batch["label"], 3)
                loss = jnp.mean(optax.softmax_cross_entropy(logits, one_hot))
                decay = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
                return loss + 0.5e-2 * decay, (new, logits)

            (loss, (new, logits)), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
            state = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
            accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
            return state, {"loss": loss, "accuracy": accuracy}

        return step

    return Program(init, build, images, BATCH_NORM)


# -- NNX -------------------------------------------------------------------------------------------


class Digits(nnx.Module):
    """A convolution and two dense layers, as mnist's."""

    def __init__(self, rngs, norm=False):
        self.conv = nnx.Conv(2, 4, (3, 3), use_bias=not norm, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs) if norm else None
        self.drop = nnx.Dropout(0.3, rngs=rngs) if norm else None
        self.first = nnx.Linear(4, HIDDEN, rngs=rngs)
        self.last = nnx.Linear(HIDDEN, 3, rngs=rngs)

    def __call__(self, x):
        x = self.conv(x)
        if self.norm is not None:
            x = self.drop(self.norm(x))
        x = nnx.avg_pool(nnx.relu(x), (SIDE, SIDE)).reshape(len(x), -1)
        launcher.mark_pipeline_boundary()
        return self.last(nnx.relu(self.first(x)))


def mnist(norm=False):
    """The module split and merged by hand; what is no parameter comes back beside the loss."""

    def init():
        _, trained, rest = split(Digits(nnx.Rngs(0), norm))
        return {"params": trained, "rest": rest}

    def split(model):
        return nnx.split(model, nnx.Param, ...)

    def build(value_and_grad):
        graph, _, _ = split(nnx.eval_shape(lambda: Digits(nnx.Rngs(0), norm)))

        def step(state, batch):
            def loss_fn(params):
                model = nnx.merge(graph, params, state["rest"], copy=True)
                logits = model(batch["image"])
                each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
                hits = (logits.argmax(1) == batch["label"]).sum()
                return each.mean(), (split(model)[2], hits)

            (loss, (rest, hits)), grads = value_and_grad(loss_fn, has_aux=True)(state["params"])
            new = descended(state["params"], grads)
            return {"params": new, "rest": rest}, {"loss": loss, "hits": hits}

        return step

    return Program(init, build, images, BATCH_NORM if norm else {})


# -- other libraries -------------------------------------------------------------------------------


@functools.cache
def equinox_network():
    """A module is a pytree of arrays and functions: both, apart."""
    import equinox as eqx

    class Network(eqx.Module):
        layers: list
        activation: object = jnp.tanh

        def __call__(self, x):
            x = self.activation(self.layers[0](x))
            launcher.mark_pipeline_boundary()
            return self.layers[1](x)

    keys = jax.random.split(jax.random.key(0))
    sizes = WIDTH, HIDDEN, CLASSES
    layers = [eqx.nn.Linear(*sizes[i : i + 2], key=keys[i]) for i in range(2)]
    return eqx.partition(Network(layers), eqx.is_inexact_array)


def equinox():
    def build(value_and_grad):
        import equinox as eqx

        static = equinox_network()[1]

        def step(arrays, b):
            def loss_fn(arrays, b):
                y = jax.vmap(eqx.combine(arrays, static))(b["x"])
                each = optax.softmax_cross_entropy_with_integer_labels(y, b["label"])
                return (each * b["mask"]).sum() / b["mask"].sum()

            loss, grads = value_and_grad(loss_fn)(arrays, b)
            return eqx.apply_updates(arrays, jax.tree.map(lambda g: -0.05 * g, grads)), loss

        return step

    return Program(lambda: equinox_network()[0], build, batch)


def haiku(norm=False):
    """`transform_with_state`: modules in a plain function."""

    def transformed():
        import haiku as hk

        def forward(x):
            h = hk.Linear(HIDDEN, with_bias=not norm)(x)
            h = hk.BatchNorm(True, True, 0.9)(h, is_training=True) if norm else h
            launcher.mark_pipeline_boundary()
            return hk.Linear(CLASSES)(jax.nn.relu(h))

        return hk.transform_with_state(forward)

    def init():
        shapes = jax.eval_shape(transformed().init, jax.random.key(0), batch(0)["x"])
        params, state = filled(shapes)
        return {"params": params, "state": state}

    def build(value_and_grad):
        apply = transformed().apply

        def step(train, b):
            def loss_fn(params, state, b):
                y, new = apply(params, state, None, b["x"])
                each = optax.softmax_cross_entropy_with_integer_labels(y, b["label"])
                return jnp.average(each, weights=b["weight"]), new

            with_state = value_and_grad(loss_fn, has_aux=True)
            (loss, new), grads = with_state(train["params"], train["state"], b)
            return {"params": descended(train["params"], grads), "state": new}, loss

        return step

    return Program(init, build, batch, BATCH_NORM if norm else {})


# -- other steps -----------------------------------------------------------------------------------


def graphs():
    """Padded graphs, a row each: messages along edges, a mean over the existing nodes, and labels,
    some of them missing, as ogbg's."""
    nodes = 5

    def of(k):
        rng = np.random.default_rng(k)
        edges = rng.integers(0, nodes, (ROWS, 7, 2)).astype(np.int32)
        known = rng.uniform(size=ROWS) < 0.6
        return {
            **batch(k),
            "nodes": rng.normal(size=(ROWS, nodes, WIDTH)).astype(np.float32),
            "edges": edges,
            "there": np.arange(nodes) < rng.integers(1, nodes, ROWS)[:, None],
            "label": np.where(known, batch(k)["label"] > 1, np.nan).astype(np.float32),
        }

    def of_graph(p, x, edges):
        messages = jnp.tanh(x[edges[:, 0]] @ p["a"])
        return jax.ops.segment_sum(messages, edges[:, 1], nodes)

    def loss(p, b):
        h = jax.vmap(of_graph, (None, 0, 0))(p, b["nodes"], b["edges"])
        launcher.mark_pipeline_boundary()
        pooled = jnp.mean(h, axis=1, where=b["there"][..., None])
        logits = (pooled @ p["b"])[:, 0]
        known = ~jnp.isnan(b["label"])
        each = optax.sigmoid_binary_cross_entropy(logits, jnp.where(known, b["label"], 0))
        return jnp.sum(jnp.where(known, each, 0)) / known.sum(), {"known": known.sum()}

    program = of_loss(loss, has_aux=True)
    return Program(program.init, program.build, of)


def policy(p, b):
    """Proximal policy optimization with advantages normalized over the batch, as ppo's."""
    advantage = (b["weight"] - b["weight"].mean()) / (b["weight"].std() + 1e-8)
    y = net(p, b)
    chance = jnp.take_along_axis(jax.nn.log_softmax(y), b["label"][:, None], 1)[:, 0]
    ratio = jnp.exp(chance - jnp.log(0.2) * b["mask"])
    clipped = jnp.clip(ratio, 0.8, 1.2)
    gain = jnp.minimum(ratio * advantage, clipped * advantage).mean()
    entropy = -(jax.nn.softmax(y) * jax.nn.log_softmax(y)).sum(1).mean()
    value = ((y[:, 0] - b["t"][:, 0]) ** 2).mean()
    return -gain + 0.5 * value - 0.01 * entropy, {
        "clipped": (jnp.abs(ratio - 1) > 0.2).mean(),
        "largest": ratio.max(),
    }


def residual(p, b):
    """A network that obeys an equation: its Laplacian at each point is known."""

    def field(x):
        h = jnp.tanh(x @ p["a"])
        launcher.mark_pipeline_boundary()
        return (jnp.tanh(h @ p["b"])).sum()

    laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(field)(x)))(b["x"])
    return ((laplacian - b["t"][:, 0]) ** 2).mean()


PROGRAMS = {
    "ImageNet's ResNet": imagenet(),
    "mnist in NNX": mnist(),
    "NNX with batch norm and dropout": mnist(norm=True),
    "Equinox": equinox(),
    "Haiku": haiku(),
    "Haiku with batch norm": haiku(norm=True),
    "graphs": graphs(),
    "policy": of_loss(policy, has_aux=True),
    "residual of an equation": of_loss(residual),
}
test_equal_to_one_device_or_refused = table_test(PROGRAMS)
