"""A decoder-only transformer on one device.

The layout is GPT-2's: learned positions, layer norm before attention and before the MLP, GELU.
(Radford et al., 2019, "Language Models are Unsupervised Multitask Learners".) Parameters carry the
names that Megatron-Core gives them and keep heads as an axis of their own. Parameters, softmax,
layer-norm statistics and loss are float32; `dtype` is the type of activations and matrix products.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from launcher.recipes import Model
from launcher.recipes.models.blocks import (
    INIT_SCALE,
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
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.language_model import (
    Packed,
    attend_cached,
    cached_decoder,
    has_cache,
    next_token_model,
    same_document,
)

_EPSILON = 1e-5


class Attention(nn.Module):
    """Causal self-attention."""

    options: GPTOptions
    output_scale: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool, packed: Packed = None) -> jax.Array:
        """Map float [batch, length, hidden] to the same; without dropout if `deterministic`."""
        (length, hidden), heads = x.shape[-2:], self.options.num_heads
        head_size = hidden // heads
        qkv = dense(x, (3, heads, head_size), "linear_qkv", self.dtype)
        query, key, value = (qkv[..., part, :, :] for part in range(3))

        if packed and has_cache(self):
            mixed = attend_cached(self, query, key, value, packed[1])
        elif packed and (deterministic or not self.options.dropout):
            is_fused = self.options.attention == "cudnn"
            mixed = attend_since(query, key, value, first_seen(packed[1]), is_fused)
        elif self.options.attention == "cudnn":  # which takes no dropout
            mixed = jax.nn.dot_product_attention(
                query, key, value, is_causal=True, implementation="cudnn"
            )
        else:
            scores = jnp.einsum("bqnh,bknh->bnqk", query * head_size**-0.5, key)
            # Made here, in each block, so that no block waits for an array of another one.
            rows = jax.lax.broadcasted_iota(jnp.int32, (length, length), 0)
            columns = jax.lax.broadcasted_iota(jnp.int32, (length, length), 1)
            seen = columns <= rows
            if packed:
                seen = seen & same_document(packed[0])
            scores = jnp.where(seen, scores.astype(jnp.float32), -jnp.inf)
            weights = jax.nn.softmax(scores, axis=-1).astype(self.dtype)
            weights = nn.Dropout(self.options.dropout)(weights, deterministic)
            mixed = jnp.einsum("bnqk,bknh->bqnh", weights, value)
        return heads_joined(mixed, hidden, self.dtype, self.output_scale)


class FeedForward(nn.Module):
    """Two dense layers with GELU between them."""

    options: GPTOptions
    output_scale: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map float [batch, length, hidden] to the same."""
        hidden = x.shape[-1]
        x = dense(x, self.options.mlp_ratio * hidden, "linear_fc1", self.dtype)
        return dense(nn.gelu(x), hidden, "linear_fc2", self.dtype, self.output_scale)


class Block(nn.Module):
    """One transformer block."""

    options: GPTOptions
    output_scale: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool, packed: Packed = None) -> jax.Array:
        """Map float [batch, length, hidden] to the same; without dropout if `deterministic`."""

        def norm(name: str) -> nn.LayerNorm:
            return nn.LayerNorm(epsilon=_EPSILON, dtype=self.dtype, name=name)

        shared = (self.options, self.output_scale, self.dtype)
        attention = Attention(*shared, name="self_attention")
        mlp, drop = FeedForward(*shared, name="mlp"), nn.Dropout(self.options.dropout)
        x = x + drop(attention(norm("input_layernorm")(x), deterministic, packed), deterministic)
        return x + drop(mlp(norm("pre_mlp_layernorm")(x)), deterministic)


class GPT(nn.Module):
    """A language model.

    Each block is one pipeline layer; the embedding belongs to the first, the final norm and the
    output layer to the last.
    """

    options: GPTOptions
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array, deterministic: bool, packed: Packed = None) -> jax.Array:
        """Map tokens, int32 [batch, length], to the last hidden values, [batch, length, hidden].

        Args:
            tokens: the tokens.
            deterministic: whether nothing is dropped.
            packed: of rows that hold several documents, each token's document and its place there.
        """
        options, normal = self.options, nn.initializers.normal(INIT_SCALE)
        words = word_embeddings(options, self.dtype)
        shape = options.sequence_length, options.hidden_size
        positions = self.param("position_embeddings", normal, shape)
        places = positions[packed[1]] if packed else positions[: tokens.shape[1]]
        x = words(tokens) + places.astype(self.dtype)
        x = nn.Dropout(options.dropout)(x, deterministic)

        scale = output_scale(options.num_layers)
        block = functools.partial(Block, options, scale, self.dtype)
        x = blocks_in_a_row(
            self,
            block,
            options.num_layers,
            x,
            packed,
            call=lambda module, x, packed: module(x, deterministic, packed),
            draws=not deterministic and options.dropout > 0,
            scanned=options.scan_layers,
        )

        x = nn.LayerNorm(epsilon=_EPSILON, dtype=self.dtype, name="final_layernorm")(x)
        output_layer(self, x)
        return x


def build_decoder(options: GPTOptions, precision: str) -> Decoder:
    """Return the decoder of a GPT; arguments as for `build`."""
    shape = options.num_heads, options.hidden_size // options.num_heads
    return cached_decoder(GPT(options, dtype_of(precision)), options, shape, deterministic=True)


def build(options: GPTOptions, precision: str) -> Model:
    """Return a GPT; see `next_token_model`.

    Args:
        options: the settings, all of them set.
        precision: "fp32" or "bf16".
    """
    return next_token_model(GPT(options, dtype_of(precision)), options, draws=True)
