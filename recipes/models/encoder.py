"""Transformer blocks in which every position sees every other one: for texts and for pictures."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

INIT_SCALE = 0.02


def gelu(x: jax.Array) -> jax.Array:
    """Map by GELU itself, as BERT's and ViT's published weights mean it, not its approximation."""
    return nn.gelu(x, approximate=False)


class EncoderBlock(nn.Module):
    """Attention and an MLP with GELU.

    Attributes:
        num_heads: of attention.
        mlp_size: the width of the MLP.
        epsilon: of the norms.
        norm_first: whether a norm stands before each branch (ViT) or after its sum (BERT).
        attention: "xla" or "cudnn".
        dtype: the type of activations and products.
    """

    num_heads: int
    mlp_size: int
    epsilon: float
    norm_first: bool
    attention: str
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map float [batch, length, hidden] to the same."""
        norms = [
            nn.LayerNorm(epsilon=self.epsilon, dtype=self.dtype, name=name)
            for name in ("attention_layernorm", "mlp_layernorm")
        ]
        for branch, norm in zip((self._attend, self._feed), norms, strict=True):
            x = x + branch(norm(x)) if self.norm_first else norm(x + branch(x))
        return x

    def _attend(self, x: jax.Array) -> jax.Array:
        hidden = x.shape[-1]
        normal = nn.initializers.normal(INIT_SCALE)
        qkv = nn.DenseGeneral(
            (3, self.num_heads, hidden // self.num_heads),
            kernel_init=normal,
            dtype=self.dtype,
            name="linear_qkv",
        )(x)
        mixed = jax.nn.dot_product_attention(
            *(qkv[..., part, :, :] for part in range(3)),
            implementation="cudnn" if self.attention == "cudnn" else "xla",
        )
        return nn.DenseGeneral(
            hidden, axis=(-2, -1), kernel_init=normal, dtype=self.dtype, name="linear_proj"
        )(mixed)

    def _feed(self, x: jax.Array) -> jax.Array:
        normal, hidden = nn.initializers.normal(INIT_SCALE), x.shape[-1]
        inner = nn.Dense(self.mlp_size, kernel_init=normal, dtype=self.dtype, name="linear_fc1")(x)
        return nn.Dense(hidden, kernel_init=normal, dtype=self.dtype, name="linear_fc2")(
            gelu(inner)
        )
