"""A small network with all that Flax NNX has: parameters, statistics and random streams."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from launcher.recipes import Model
from launcher.recipes.models.blocks import dtype_of
from launcher.recipes.models.nnx import model as nnx_model
from launcher.recipes.models.toy import ToyOptions
from launcher.trace import mark_pipeline_boundary, per_slice


class Layer(nnx.Module):
    """A dense layer, batch normalization by slice, ReLU, dropout."""

    def __init__(self, inputs: int, options: ToyOptions, dtype: Any, rngs: nnx.Rngs) -> None:
        size = options.hidden_size
        self.dense = nnx.Linear(inputs, size, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(size, momentum=0.9, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(options.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map float [batch, inputs] to float [batch, hidden_size]."""
        normed: Any = per_slice(self.norm)(self.dense(x))
        return self.dropout(nnx.relu(normed))


class Toy(nnx.Module):
    """Layers for regression; each is one pipeline layer."""

    def __init__(self, options: ToyOptions, dtype: Any, rngs: nnx.Rngs) -> None:
        sizes = [options.input_size, *[options.hidden_size] * (options.num_layers - 1)]
        self.layers = nnx.List([Layer(size, options, dtype, rngs) for size in sizes[:-1]])
        self.last = nnx.Linear(sizes[-1], options.output_size, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map float [batch, input_size] to float [batch, output_size]."""
        for layer in self.layers:
            x = layer(x)
            mark_pipeline_boundary()
        return self.last(x)


def build(options: ToyOptions, precision: str) -> Model:
    """Return a network whose loss is the mean squared error over batch and outputs.

    A batch holds `x`, float32 [batch, input_size], and `y`, float32 [batch, output_size].

    Args:
        options: the widths.
        precision: "fp32" or "bf16".
    """
    dtype = dtype_of(precision)

    def loss(net: Toy, batch: Any) -> jax.Array:
        return jnp.mean(jnp.square(net(batch["x"]).astype(jnp.float32) - batch["y"]))

    return nnx_model(lambda rngs: Toy(options, dtype, rngs), loss)
