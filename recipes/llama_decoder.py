"""Llama as a decoder: the same blocks as in `llama`, whose attention remembers keys and values."""

from __future__ import annotations

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from recipes.decoding import Decoder, attend, last_of, layers_of, remembered, visible
from recipes.llama import FeedForward, rotary_frequencies, rotate
from recipes.llama_options import LlamaOptions


def build_decoder(options: LlamaOptions, precision: str) -> Decoder:
    """Return a Llama that goes on with texts.

    Args:
        options: the settings, all of them set.
        precision: "fp32" or "bf16".
    """
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    num_layers, longest = cast(int, options.num_layers), cast(int, options.sequence_length)
    head_size, kv_heads = cast(int, options.head_size), cast(int, options.num_kv_heads)
    normed = nn.RMSNorm(epsilon=cast(float, options.norm_epsilon), dtype=dtype)
    feed_forward = FeedForward(options, 0.0, dtype)
    stretch = cast(float, options.rope_base), cast(float, options.rope_factor)
    frequencies = rotary_frequencies(head_size, *stretch)

    def norm(params: Any, x: jax.Array) -> jax.Array:
        return cast(jax.Array, normed.apply({"params": params}, x))

    def cache(batch: int) -> Any:
        empty = jnp.zeros((batch, longest, kv_heads, head_size), dtype)
        return [(empty, empty) for _ in range(num_layers)]

    def attention(params: Any, x: jax.Array, start: jax.Array, known: Any) -> tuple[Any, Any]:
        def heads(name: str) -> jax.Array:
            weights = params[name]
            made = jnp.einsum("bld,dnh->blnh", x, weights["kernel"].astype(dtype))
            return made + weights["bias"].astype(dtype) if "bias" in weights else made

        query, key, value = (heads(f"linear_{one}") for one in "qkv")
        if options.head_norm:
            query, key = norm(params["q_norm"], query), norm(params["k_norm"], key)
        positions = start[:, None] + jnp.arange(x.shape[1])
        query, key = (rotate(one, positions, frequencies) for one in (query, key))
        keys, values = (remembered(*pair, start) for pair in zip(known, (key, value), strict=True))
        seen = visible(start, x.shape[1], longest, options.sliding_window or 0)
        mixed = attend(query, keys, values, seen)
        kernel = params["linear_proj"]["kernel"].astype(dtype)
        return jnp.einsum("blnh,nhd->bld", mixed, kernel), (keys, values)

    def read(
        params: Any, cache: Any, tokens: jax.Array, start: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, Any]:
        words = params["word_embeddings"]["embedding"].astype(dtype)
        x = words[tokens]
        if options.scale_embeddings:
            x = x * jnp.asarray(cast(int, options.hidden_size) ** 0.5, dtype)
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
