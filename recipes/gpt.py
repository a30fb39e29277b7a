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

from recipes import Model
from recipes.blocks import blocks_in_a_row
from recipes.gpt_options import DIMENSIONS, GPTOptions
from recipes.losses import next_token_loss
from recipes.packing import Packed, packing_of, same_document

_INIT_SCALE = 0.02
EPSILON = 1e-5


class Attention(nn.Module):
    """Causal self-attention."""

    num_heads: int
    dropout: float
    output_scale: float
    dtype: Any
    fused: bool = False  # by cuDNN's kernel, which takes no dropout

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool, packed: Packed = None) -> jax.Array:
        """Map float [batch, length, hidden] to the same; without dropout if `deterministic`."""
        length, hidden = x.shape[-2:]
        head_size = hidden // self.num_heads
        qkv = nn.DenseGeneral(
            (3, self.num_heads, head_size),
            kernel_init=nn.initializers.normal(_INIT_SCALE),
            dtype=self.dtype,
            name="linear_qkv",
        )(x)
        query, key, value = (qkv[..., part, :, :] for part in range(3))

        if self.fused and packed is None:
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
            weights = nn.Dropout(self.dropout)(weights, deterministic)
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

    ratio: int
    output_scale: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map float [batch, length, hidden] to the same."""
        hidden = x.shape[-1]
        x = nn.Dense(
            self.ratio * hidden,
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

    num_heads: int
    mlp_ratio: int
    dropout: float
    output_scale: float
    dtype: Any
    fused: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool, packed: Packed = None) -> jax.Array:
        """Map float [batch, length, hidden] to the same; without dropout if `deterministic`."""

        def norm(name: str) -> nn.LayerNorm:
            return nn.LayerNorm(epsilon=EPSILON, dtype=self.dtype, name=name)

        attention = Attention(
            self.num_heads,
            self.dropout,
            self.output_scale,
            self.dtype,
            self.fused,
            name="self_attention",
        )
        mlp = FeedForward(self.mlp_ratio, self.output_scale, self.dtype, name="mlp")
        drop = nn.Dropout(self.dropout)
        x = x + drop(attention(norm("input_layernorm")(x), deterministic, packed), deterministic)
        return x + drop(mlp(norm("pre_mlp_layernorm")(x)), deterministic)


class GPT(nn.Module):
    """A language model.

    Each block is one pipeline layer; the embedding belongs to the first, the final norm and the
    output layer to the last.
    """

    vocab_size: int
    sequence_length: int
    num_layers: int
    num_heads: int
    hidden_size: int
    mlp_ratio: int
    dropout: float
    tie_embeddings: bool
    scan_layers: bool
    dtype: Any
    fused_attention: bool = False

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
        normal = nn.initializers.normal(_INIT_SCALE)
        words = nn.Embed(
            self.vocab_size,
            self.hidden_size,
            embedding_init=normal,
            dtype=self.dtype,
            name="word_embeddings",
        )
        positions = self.param(
            "position_embeddings", normal, (self.sequence_length, self.hidden_size)
        )
        places = positions[packed[1]] if packed else positions[: tokens.shape[1]]
        x = words(tokens) + places.astype(self.dtype)
        x = nn.Dropout(self.dropout)(x, deterministic)

        # The 2 * num_layers branches that are added to x keep its variance (GPT-2, section 2.3).
        output_scale = _INIT_SCALE / (2 * self.num_layers) ** 0.5
        block = functools.partial(
            Block,
            self.num_heads,
            self.mlp_ratio,
            self.dropout,
            output_scale,
            self.dtype,
            self.fused_attention,
        )
        if self.scan_layers:
            scanned = nn.scan(
                lambda module, x: (module(x, deterministic, packed), None),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=self.num_layers,
            )
            x, _ = scanned(block(name="layers"), x)
        else:
            x = blocks_in_a_row(
                self,
                block,
                self.num_layers,
                x,
                packed,
                call=lambda module, x, packed: module(x, deterministic, packed),
                draws=not deterministic and self.dropout > 0,
            )

        x = nn.LayerNorm(epsilon=EPSILON, dtype=self.dtype, name="final_layernorm")(x)
        if not with_logits:
            return x
        if self.tie_embeddings:
            return words.attend(x)
        return nn.Dense(
            self.vocab_size,
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
        options: the dimensions, all of them set.
        precision: "fp32" or "bf16".
    """
    gpt = GPT(
        **{name: getattr(options, name) for name in DIMENSIONS},
        mlp_ratio=options.mlp_ratio,
        dropout=options.dropout,
        tie_embeddings=options.tie_embeddings,
        scan_layers=options.scan_layers,
        dtype=jnp.bfloat16 if precision == "bf16" else jnp.float32,
        fused_attention=options.attention == "cudnn",
    )

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
