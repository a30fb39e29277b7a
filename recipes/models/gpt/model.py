"""A decoder-only transformer on one device.

The layout is GPT-2's: learned positions, layer norm before attention and before the MLP, GELU.
(Radford et al., 2019, "Language Models are Unsupervised Multitask Learners".) Parameters carry the
names that Megatron-Core gives them and keep heads as an axis of their own. Parameters, softmax,
layer-norm statistics and loss are float32; `dtype` is the type of activations and matrix products.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from launcher.recipes import Model
from launcher.recipes.data.packing import Packed, packing_of, same_document
from launcher.recipes.models.blocks import blocks_in_a_row
from launcher.recipes.models.gpt.options import GPTOptions
from launcher.recipes.models.losses import next_token_loss

_INIT_SCALE = 0.02
EPSILON = 1e-5


class Attention(nn.Module):
    """Causal self-attention."""

    options: GPTOptions
    output_scale: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool, packed: Packed = None) -> jax.Array:
        """Map float [batch, length, hidden] to the same; without dropout if `deterministic`."""
        (length, hidden), heads = x.shape[-2:], cast(int, self.options.num_heads)
        head_size = hidden // heads
        qkv = nn.DenseGeneral(
            (3, heads, head_size),
            kernel_init=nn.initializers.normal(_INIT_SCALE),
            dtype=self.dtype,
            name="linear_qkv",
        )(x)
        query, key, value = (qkv[..., part, :, :] for part in range(3))

        if self.options.attention == "cudnn" and packed is None:  # which takes no dropout
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
            cast(int, self.options.mlp_ratio) * hidden,
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
            return nn.LayerNorm(epsilon=EPSILON, dtype=self.dtype, name=name)

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
    def __call__(
        self,
        tokens: jax.Array,
        deterministic: bool,
        packed: Packed = None,
        with_logits: bool = True,
    ) -> jax.Array:
        """Map tokens, int32 [batch, length], to logits, `dtype` [batch, length, vocab_size].

        Args:
            tokens: the tokens.
            deterministic: whether nothing is dropped.
            packed: of rows that hold several documents, each token's document and its place there.
            with_logits: False: return the last hidden values, `dtype` [batch, length, hidden_size].
        """
        options, normal = self.options, nn.initializers.normal(_INIT_SCALE)
        num_layers, hidden = cast(int, options.num_layers), cast(int, options.hidden_size)
        words = nn.Embed(
            cast(int, options.vocab_size),
            hidden,
            embedding_init=normal,
            dtype=self.dtype,
            name="word_embeddings",
        )
        positions = self.param(
            "position_embeddings", normal, (cast(int, options.sequence_length), hidden)
        )
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

        x = nn.LayerNorm(epsilon=EPSILON, dtype=self.dtype, name="final_layernorm")(x)
        if not with_logits:
            return x
        if options.tie_embeddings:
            return words.attend(x)
        return nn.Dense(
            cast(int, options.vocab_size),
            use_bias=False,
            kernel_init=normal,
            dtype=self.dtype,
            name="output_layer",
        )(x)


def build(options: GPTOptions, precision: str) -> Model:
    """Return a GPT whose loss is the mean cross-entropy of the next token.

    A batch holds `tokens` and `targets`, int32 [batch, sequence_length]; with `segments` and
    `positions`, attention keeps within documents, and with `weights` the mean is weighted.

    Args:
        options: the settings, all of them set.
        precision: "fp32" or "bf16".
    """
    gpt = GPT(options, jnp.bfloat16 if precision == "bf16" else jnp.float32)

    def init(key: jax.Array) -> Any:
        return gpt.init(key, jnp.zeros((1, 1), jnp.int32), deterministic=True)["params"]

    def loss(
        params: Any, batch: Any, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        hidden = gpt.apply(
            {"params": params},
            batch["tokens"],
            deterministic=key is None,
            packed=packing_of(batch),
            with_logits=False,
            rngs=None if key is None else {"dropout": key},
        )
        last, chunks = cast(jax.Array, hidden), options.loss_chunks
        return next_token_loss(last, params, batch, gpt.dtype, chunks, evaluates=key is None)

    return Model(init, loss)
