"""A user's module: dense layers with batch norm, dropout and a counter, in linen and in NNX.

Options: `kind` ("linen" or "nnx"), `width`, `dropout`, and `marked`: whether each slice normalizes
by itself.
"""

import itertools

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx

import launcher
from launcher.recipes import Model

LAYERS = 2


class Linen(nn.Module):
    width: int
    dropout: float
    marked: bool

    @nn.compact
    def __call__(self, x, train):
        for i in range(LAYERS):
            if i:
                launcher.mark_pipeline_boundary()
            norm = nn.BatchNorm(use_running_average=not train, momentum=0.9)
            x = nn.relu(
                (launcher.per_slice(norm) if self.marked else norm)(nn.Dense(self.width)(x))
            )
            x = nn.Dropout(self.dropout)(x, deterministic=not train)
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        if train:
            calls.value += 1
        return nn.Dense(2)(x)


class NNX(nnx.Module):
    def __init__(self, options, rngs):
        sizes = [options.input_size, *[options.width] * LAYERS]
        pairs = itertools.pairwise(sizes)
        self.dense = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairs])
        self.norms = nnx.List([nnx.BatchNorm(n, momentum=0.9, rngs=rngs) for n in sizes[1:]])
        self.dropout = nnx.List([nnx.Dropout(options.dropout, rngs=rngs) for _ in sizes[1:]])
        self.head = nnx.Linear(options.width, 2, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.marked = options.marked

    def __call__(self, x):
        for i, (dense, norm, drop) in enumerate(
            zip(self.dense, self.norms, self.dropout, strict=True)
        ):
            if i:
                launcher.mark_pipeline_boundary()
            x = drop(nnx.relu((launcher.per_slice(norm) if self.marked else norm)(dense(x))))
        self.calls[...] += 1
        return self.head(x)


def squared(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2), {"mean": jnp.mean(outputs)}


def build(options, precision):
    if options.kind == "nnx":
        return launcher.nnx.model(
            lambda rngs: NNX(options, rngs), lambda net, batch: squared(net(batch["x"]), batch)
        )
    net = Linen(options.width, options.dropout, options.marked)

    def init(key):
        state = net.init(key, jnp.zeros((1, options.input_size)), train=False)
        return state.pop("params"), state

    def loss(params, state, batch, key):
        outputs, new = net.apply(
            {"params": params, **state},
            batch["x"],
            train=key is not None,
            mutable=list(state),
            rngs=None if key is None else {"dropout": key},
        )
        value, metrics = squared(outputs, batch)
        return value, (metrics, new)

    return Model(init, loss, has_state=True)
