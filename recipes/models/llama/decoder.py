"""Llama as a decoder."""

from __future__ import annotations

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from launcher.recipes.models.cached_blocks import CachedBlocks
from launcher.recipes.models.decoding import Decoder
from launcher.recipes.models.llama.model import FeedForward, rotary_frequencies, rotate
from launcher.recipes.models.llama.options import LlamaOptions


def build_decoder(options: LlamaOptions, precision: str) -> Decoder:
    """Return a Llama that goes on with texts.

    Args:
        options: the settings, all of them set.
        precision: "fp32" or "bf16".
    """
    return cached_blocks(options, precision).decoder()


def cached_blocks(options: LlamaOptions, precision: str) -> CachedBlocks:
    """Return a Llama's blocks; one with other MLPs replaces `feed_forward`."""
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    head_size = cast(int, options.head_size)
    rms_norm = nn.RMSNorm(epsilon=cast(float, options.norm_epsilon), dtype=dtype)
    mlp = FeedForward(options, 0.0, dtype)
    stretch = cast(float, options.rope_base), cast(float, options.rope_factor)
    frequencies = rotary_frequencies(head_size, *stretch)

    def embed(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        del positions  # attention has them
        x: jax.Array = params["word_embeddings"]["embedding"].astype(dtype)[tokens]
        if options.scale_embeddings:
            x = x * jnp.asarray(cast(int, options.hidden_size) ** 0.5, dtype)
        return x

    def norm(params: Any, x: jax.Array) -> jax.Array:
        return cast(jax.Array, rms_norm.apply({"params": params}, x))

    def heads(
        params: Any, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        def dense(name: str) -> jax.Array:
            weights = jax.tree.map(lambda leaf: leaf.astype(dtype), params[name])
            made = jnp.einsum("bld,dnh->blnh", x, weights["kernel"])
            return made + weights["bias"] if "bias" in weights else made

        query, key, value = (dense(f"linear_{one}") for one in "qkv")
        if options.head_norm:
            query, key = norm(params["q_norm"], query), norm(params["k_norm"], key)
        return rotate(query, positions, frequencies), rotate(key, positions, frequencies), value

    def feed_forward(params: Any, x: jax.Array) -> jax.Array:
        return cast(jax.Array, mlp.apply({"params": params["mlp"]}, x))

    return CachedBlocks(
        num_layers=cast(int, options.num_layers),
        length=cast(int, options.sequence_length),
        num_kv_heads=cast(int, options.num_kv_heads),
        head_size=head_size,
        dtype=dtype,
        embed=embed,
        norm=norm,
        heads=heads,
        feed_forward=feed_forward,
        window=options.sliding_window or 0,
    )
