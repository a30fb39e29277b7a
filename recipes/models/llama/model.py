"""Llama on one device: rotary positions, RMS norms, gated MLPs, grouped-query attention.

(Touvron et al., 2023, "Llama 2"; Grattafiori et al., 2024, "The Llama 3 Herd of Models".) By its
options it is also Qwen 2.5 and 3, Mistral, Gemma and the shapes of MPT. Parameters carry the names
that Megatron-Core gives them and keep heads as an axis of their own. Parameters, norms, rotations,
softmax and loss are float32; `dtype` is the type of activations and matrix products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from launcher.recipes import Model
from launcher.recipes.models.blocks import (
    blocks_in_a_row,
    dense,
    dtype_of,
    heads_joined,
    output_layer,
    output_scale,
    word_embeddings,
)
from launcher.recipes.models.decoding import Decoder
from launcher.recipes.models.document_attention import attend_since, first_seen
from launcher.recipes.models.language_model import (
    Packed,
    attend_cached,
    cached_decoder,
    has_cache,
    next_token_model,
)
from launcher.recipes.models.llama import LlamaOptions

# Llama 3.1's stretching: wavelengths up to a quarter of the first training's length stay, those
# beyond all of it are stretched, and those between by something between.
_LOW, _HIGH, _ORIGINAL_LENGTH = 1.0, 4.0, 8192
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"silu": nn.silu, "gelu": nn.gelu}


def rotary_frequencies(head_size: int, base: float, factor: float = 1.0) -> np.ndarray:
    """Return the angles by which a position turns each pair of a head, float32 [head_size / 2].

    (Su et al., 2021, "RoFormer"; the stretching by `factor` is Llama 3.1's.)
    """
    frequencies = base ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    if factor != 1.0:
        turns = _ORIGINAL_LENGTH * frequencies / (2 * math.pi)
        share = np.clip((turns - _LOW) / (_HIGH - _LOW), 0.0, 1.0)
        frequencies = (1 - share) * frequencies / factor + share * frequencies
    return frequencies.astype(np.float32)


def rotate(x: jax.Array, positions: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Turn the pairs of each head by its position; a pair is an entry of each half.

    Args:
        x: float [batch, length, heads, head_size].
        positions: int32 [length] or [batch, length].
        frequencies: float32 [head_size / 2].
    """
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = (f(angles)[..., None, :] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class Attention(nn.Module):
    """Causal self-attention, whose heads may share keys and values."""

    options: LlamaOptions
    output_scale: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, packed: Packed = None) -> jax.Array:
        """Map float [batch, length, hidden] to the same; a `packed` batch by its documents."""
        options = self.options

        def heads(count: int, name: str) -> jax.Array:
            shape = count, options.head_size
            return dense(x, shape, name, self.dtype, bias=options.qkv_bias)

        query = heads(options.num_heads, "linear_q")
        key = heads(options.num_kv_heads, "linear_k")
        value = heads(options.num_kv_heads, "linear_v")
        if options.head_norm:
            norm = functools.partial(nn.RMSNorm, epsilon=options.norm_epsilon, dtype=self.dtype)
            query, key = norm(name="q_norm")(query), norm(name="k_norm")(key)
        # Made here, in each block, so that no block waits for an array of another one.
        positions = packed[1] if packed else jax.lax.iota(jnp.int32, x.shape[1])
        window = options.sliding_window
        frequencies = rotary_frequencies(options.head_size, options.rope_base, options.rope_factor)
        query, key = rotate(query, positions, frequencies), rotate(key, positions, frequencies)
        if packed and has_cache(self):
            mixed = attend_cached(self, query, key, value, positions, window)
        elif packed or (window and options.attention != "cudnn"):
            first = first_seen(jnp.broadcast_to(positions, x.shape[:2]), window)
            mixed = attend_since(query, key, value, first, options.attention == "cudnn")
        else:
            mixed = jax.nn.dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                local_window_size=(window - 1, 0) if window else None,
                implementation="cudnn" if options.attention == "cudnn" else "xla",
            )
        return heads_joined(mixed, x.shape[-1], self.dtype, self.output_scale, bias=False)


class FeedForward(nn.Module):
    """An MLP, gated (Shazeer, 2020, "GLU Variants Improve Transformer") or not."""

    options: LlamaOptions
    output_scale: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map float [batch, length, hidden] to the same."""
        width, dtype = self.options.mlp_size, self.dtype
        activation = ACTIVATIONS[self.options.activation]
        if self.options.gated_mlp:
            gate = activation(dense(x, width, "linear_gate", dtype, bias=False))
            inner = gate * dense(x, width, "linear_up", dtype, bias=False)
        else:
            inner = activation(dense(x, width, "linear_up", dtype, bias=False))
        return dense(inner, x.shape[-1], "linear_down", dtype, self.output_scale, bias=False)


class Block(nn.Module):
    """One transformer block."""

    options: LlamaOptions
    output_scale: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, packed: Packed = None) -> jax.Array:
        """Map float [batch, length, hidden] to the same."""
        x, inner = attended(self, x, packed)
        shared = (self.options, self.output_scale, self.dtype)
        return x + FeedForward(*shared, name="mlp")(inner)


def attended(block: Any, x: jax.Array, packed: Packed) -> tuple[jax.Array, jax.Array]:
    """Return hidden values after attention, and normed, in the compact method of a block."""

    def norm(name: str) -> nn.RMSNorm:
        return nn.RMSNorm(epsilon=block.options.norm_epsilon, dtype=block.dtype, name=name)

    attention = Attention(block.options, block.output_scale, block.dtype, name="self_attention")
    x = x + attention(norm("input_layernorm")(x), packed)
    return x, norm("pre_mlp_layernorm")(x)


class Llama(nn.Module):
    """A language model.

    Each block is one pipeline layer; the embedding belongs to the first, the final norm and the
    output layer to the last.
    """

    options: LlamaOptions
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array, packed: Packed = None) -> jax.Array:
        """Map tokens, int32 [batch, length], to the last hidden values, [batch, length, hidden].

        Args:
            tokens: the tokens.
            packed: of rows that hold several documents, each token's document and its place there.
        """
        options, x = self.options, embedded(self, tokens)
        block = functools.partial(Block, options, output_scale(options.num_layers), self.dtype)
        count, scans = options.num_layers, options.scan_layers
        return normed(self, blocks_in_a_row(self, block, count, x, packed, scanned=scans))


def embedded(model: Any, tokens: jax.Array) -> jax.Array:
    """Return the embeddings of tokens, in the compact method of a model."""
    x = word_embeddings(model.options, model.dtype)(tokens)
    if model.options.scale_embeddings:
        x = x * jnp.asarray(model.options.hidden_size**0.5, model.dtype)
    return x


def normed(model: Any, x: jax.Array) -> jax.Array:
    """Return the last hidden values, in the compact method of a model."""
    epsilon = model.options.norm_epsilon
    x = nn.RMSNorm(epsilon=epsilon, dtype=model.dtype, name="final_layernorm")(x)
    output_layer(model, x)
    return x


def build_decoder(options: LlamaOptions, precision: str) -> Decoder:
    """Return the decoder of a Llama; arguments as for `build`."""
    shape = options.num_kv_heads, options.head_size
    return cached_decoder(Llama(options, dtype_of(precision)), options, shape)


def build(options: LlamaOptions, precision: str) -> Model:
    """Return a Llama; see `next_token_model`.

    Args:
        options: the settings, all of them set.
        precision: "fp32" or "bf16".
    """
    return next_token_model(Llama(options, dtype_of(precision)), options)
