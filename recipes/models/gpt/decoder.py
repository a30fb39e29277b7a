"""GPT as a decoder."""

from __future__ import annotations

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from launcher.recipes.models.cached_blocks import CachedBlocks
from launcher.recipes.models.decoding import Decoder
from launcher.recipes.models.gpt.model import EPSILON, FeedForward
from launcher.recipes.models.gpt.options import GPTOptions


def build_decoder(options: GPTOptions, precision: str) -> Decoder:
    """Return a GPT that goes on with texts.

    Args:
        options: the settings, all of them set.
        precision: "fp32" or "bf16".
    """
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    heads, hidden = cast(int, options.num_heads), cast(int, options.hidden_size)
    layer_norm = nn.LayerNorm(epsilon=EPSILON, dtype=dtype)
    mlp = FeedForward(options, 0.0, dtype)

    def embed(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        words = params["word_embeddings"]["embedding"].astype(dtype)
        places = params["position_embeddings"].astype(dtype)
        return cast(jax.Array, words[tokens] + places[positions])

    def norm(params: Any, x: jax.Array) -> jax.Array:
        return cast(jax.Array, layer_norm.apply({"params": params}, x))

    def qkv(
        params: Any, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        del positions  # the embedding has them
        dense = jax.tree.map(lambda leaf: leaf.astype(dtype), params["linear_qkv"])
        made = jnp.einsum("bld,dpnh->blpnh", x, dense["kernel"]) + dense["bias"]
        return made[:, :, 0], made[:, :, 1], made[:, :, 2]

    def feed_forward(params: Any, x: jax.Array) -> jax.Array:
        return cast(jax.Array, mlp.apply({"params": params["mlp"]}, x))

    return CachedBlocks(
        num_layers=cast(int, options.num_layers),
        length=cast(int, options.sequence_length),
        num_kv_heads=heads,
        head_size=hidden // heads,
        dtype=dtype,
        embed=embed,
        norm=norm,
        heads=qkv,
        feed_forward=feed_forward,
    ).decoder()
