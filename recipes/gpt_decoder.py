"""GPT as a decoder: the same blocks as in `gpt`, whose attention remembers keys and values."""

from __future__ import annotations

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from recipes.decoding import Decoder, attend, last_of, layers_of, remembered, visible
from recipes.gpt import EPSILON, FeedForward
from recipes.gpt_options import GPTOptions


def build_decoder(options: GPTOptions, precision: str) -> Decoder:
    """Return a GPT that goes on with texts.

    Args:
        options: the dimensions, all of them set.
        precision: "fp32" or "bf16".
    """
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    num_layers, hidden = cast(int, options.num_layers), cast(int, options.hidden_size)
    heads, longest = cast(int, options.num_heads), cast(int, options.sequence_length)
    normed, feed_forward = (
        nn.LayerNorm(epsilon=EPSILON, dtype=dtype),
        FeedForward(options.mlp_ratio, 0.0, dtype),
    )

    def norm(params: Any, x: jax.Array) -> jax.Array:
        return cast(jax.Array, normed.apply({"params": params}, x))

    def cache(batch: int) -> Any:
        empty = jnp.zeros((batch, longest, heads, hidden // heads), dtype)
        return [(empty, empty) for _ in range(num_layers)]

    def attention(params: Any, x: jax.Array, start: jax.Array, known: Any) -> tuple[Any, Any]:
        weights = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        qkv = jnp.einsum("bld,dpnh->blpnh", x, weights["linear_qkv"]["kernel"])
        query, key, value = jnp.moveaxis(qkv + weights["linear_qkv"]["bias"], 2, 0)
        keys, values = (remembered(*pair, start) for pair in zip(known, (key, value), strict=True))
        mixed = attend(query, keys, values, visible(start, x.shape[1], longest))
        out = jnp.einsum("blnh,nhd->bld", mixed, weights["linear_proj"]["kernel"])
        return out + weights["linear_proj"]["bias"], (keys, values)

    def read(
        params: Any, cache: Any, tokens: jax.Array, start: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, Any]:
        words = params["word_embeddings"]["embedding"].astype(dtype)
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        x = words[tokens] + params["position_embeddings"].astype(dtype)[positions]
        new = []
        for layer, known in zip(layers_of(params, num_layers), cache, strict=True):
            inside = norm(layer["input_layernorm"], x)
            mixed, both = attention(layer["self_attention"], inside, start, known)
            new.append(both)
            x = x + mixed
            inside = norm(layer["pre_mlp_layernorm"], x)
            x = x + cast(jax.Array, feed_forward.apply({"params": layer["mlp"]}, inside))
        x = norm(params["final_layernorm"], last_of(x, last))
        head = words.T if options.tie_embeddings else params["output_layer"]["kernel"]
        return (x @ head.astype(dtype))[:, 0].astype(jnp.float32), new

    return Decoder(cache, read, longest)
