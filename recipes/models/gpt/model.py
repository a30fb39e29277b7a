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
from launcher.recipes.data.packing import Packed, same_document
from launcher.recipes.models.blocks import blocks_in_a_row, dtype_of
from launcher.recipes.models.decoding import Decoder
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.language_model import (
    attend_cached,
    cached_decoder,
    has_cache,
    next_token_model,
)

_INIT_SCALE = 0.02
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
        qkv = nn.DenseGeneral(
            (3, heads, head_size),
            kernel_init=nn.initializers.normal(_INIT_SCALE),
            dtype=self.dtype,
            name="linear_qkv",
        )(x)
        query, key, value = (qkv[..., part, :, :] for part in range(3))

        if packed and has_cache(self):
            mixed = attend_cached(self, query, key, value, packed[1])
        elif self.options.attention == "cudnn" and packed is None:  # which takes no dropout
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
        return nn.DenseGeneral(
            hidden,
            axis=(-2, -1),
            kernel_init=nn.initializers.normal(self.output_scale),
            dtype=self.dtype,
            name="linear_proj",
        )(mixed)


class FeedForward(nn.Module):
    """Two dense layers with GELU between them."""

    options: GPTOptions
    output_scale: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map float [batch, length, hidden] to the same."""
        hidden = x.shape[-1]
        x = nn.Dense(
            self.options.mlp_ratio * hidden,
            kernel_init=nn.initializers.normal(_INIT_SCALE),
            dtype=self.dtype,
            name="linear_fc1",
        )(x)
        return nn.Dense(
            hidden,
            kernel_init=nn.initializers.normal(self.output_scale),
            dtype=self.dtype,
            name="linear_fc2",
        )(nn.gelu(x))


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
        options, normal = self.options, nn.initializers.normal(_INIT_SCALE)
        num_layers, hidden = options.num_layers, options.hidden_size
        vocab_size, shape = options.vocab_size, (options.sequence_length, hidden)
        words = nn.Embed(
            vocab_size, hidden, embedding_init=normal, dtype=self.dtype, name="word_embeddings"
        )
        positions = self.param("position_embeddings", normal, shape)
        places = positions[packed[1]] if packed else positions[: tokens.shape[1]]
        x = words(tokens) + places.astype(self.dtype)
        x = nn.Dropout(options.dropout)(x, deterministic)

        # The 2 * num_layers branches that are added to x keep its variance (GPT-2, section 2.3).
        block = functools.partial(Block, options, _INIT_SCALE / (2 * num_layers) ** 0.5, self.dtype)
        x = blocks_in_a_row(
            self,
            block,
            num_layers,
            x,
            packed,
            call=lambda module, x, packed: module(x, deterministic, packed),
            draws=not deterministic and options.dropout > 0,
            scanned=options.scan_layers,
        )

        x = nn.LayerNorm(epsilon=_EPSILON, dtype=self.dtype, name="final_layernorm")(x)
        if not options.tie_embeddings and self.is_initializing():  # the loss multiplies by it
            nn.Dense(vocab_size, False, kernel_init=normal, name="output_layer")(x)
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
