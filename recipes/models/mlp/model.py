"""A stack of dense layers for regression, on one device."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from launcher.recipes import Model
from launcher.recipes.models.blocks import applied, dtype_of
from launcher.recipes.models.losses import Metrics
from launcher.recipes.models.mlp import MLPOptions
from launcher.trace import mark_pipeline_boundary


class MLP(nn.Module):
    """Dense layers of these hidden widths with ReLU between; each is one pipeline layer.

    Attributes:
        widths: the hidden layers'.
        output_size: the last layer's.
        output_relu: whether ReLU follows the last layer, too.
        dtype: the type of activations and products.
    """

    widths: tuple[int, ...]
    output_size: int
    output_relu: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map float [batch, input size] to float [batch, output_size]."""
        for index, width in enumerate(self.widths):
            x = nn.relu(nn.Dense(width, dtype=self.dtype, name=f"layers_{index}")(x))
            mark_pipeline_boundary()
        x = nn.Dense(self.output_size, dtype=self.dtype, name="output_layer")(x)
        return nn.relu(x) if self.output_relu else x


def build(options: MLPOptions, precision: str) -> Model:
    """Return an MLP whose loss is the mean squared error over batch and outputs.

    A batch holds `x`, float32 [batch, input_size], and `y`, float32 [batch, output_size].

    Args:
        options: the widths of the layers.
        precision: "fp32" or "bf16".
    """
    dtype = dtype_of(precision)
    widths = options.widths or [options.hidden_size] * (options.num_layers - 1)
    mlp = MLP(tuple(widths), options.output_size, options.output_relu, dtype)

    def init(key: jax.Array) -> Any:
        return mlp.init(key, jnp.zeros((1, options.input_size)))["params"]

    def loss(params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        outputs = applied(mlp, params, batch["x"])
        return jnp.mean(jnp.square(outputs.astype(jnp.float32) - batch["y"])), {}

    return Model(init, loss)
