"""Decoders of pre-norm transformer blocks, whose attention remembers keys and values.

A family says what its blocks do (`CachedBlocks`); reading a text by them is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from launcher.recipes.models.decoding import Decoder
from launcher.recipes.models.losses import output_matrix


@dataclass(frozen=True)
class CachedBlocks:
    """A language model as its decoder reads it.

    A block adds attention to its input and an MLP to that, both of normed values. Hidden values are
    `dtype` [batch, length, hidden], positions int32 [batch, length].

    Attributes:
        num_layers: the number of blocks.
        length: the longest text.
        num_kv_heads: the heads of keys and values.
        head_size: the size of a head.
        dtype: the type of activations, products and the cache.
        embed: maps the model's parameters, tokens and their positions to hidden values.
        norm: maps a norm's parameters and hidden values to normed ones.
        heads: maps attention's parameters, hidden values and positions to queries, [batch, length,
            num_heads, head_size], keys and values, [batch, length, num_kv_heads, head_size].
        feed_forward: maps a block's parameters and hidden values to what its MLP makes of them.
        window: how many positions a token sees at most, its own included; 0: all before it.
    """

    num_layers: int
    length: int
    num_kv_heads: int
    head_size: int
    dtype: Any
    embed: Callable[[Any, jax.Array, jax.Array], jax.Array]
    norm: Callable[[Any, jax.Array], jax.Array]
    heads: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
    feed_forward: Callable[[Any, jax.Array], jax.Array]
    window: int = 0

    def decoder(self) -> Decoder:
        """Return the decoder; its cache holds each block's keys and values."""
        return Decoder(self._cache, self._read, self.length)

    def _cache(self, batch: int) -> Any:
        empty = jnp.zeros((batch, self.length, self.num_kv_heads, self.head_size), self.dtype)
        return [(empty, empty) for _ in range(self.num_layers)]

    def _read(
        self, params: Any, cache: Any, tokens: jax.Array, start: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, Any]:
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        x, new = self.embed(params, tokens, positions), []
        for block, known in zip(_blocks(params, self.num_layers), cache, strict=True):
            inner = self.norm(block["input_layernorm"], x)
            mixed, known = self._attend(block["self_attention"], inner, positions, known)
            new.append(known)
            x = x + mixed
            x = x + self.feed_forward(block, self.norm(block["pre_mlp_layernorm"], x))
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
        x = self.norm(params["final_layernorm"], x)
        return (x @ output_matrix(params).astype(self.dtype)).astype(jnp.float32), new

    def _attend(self, params: Any, x: jax.Array, positions: jax.Array, known: Any) -> Any:
        """Return what attention makes of hidden values, and the keys and values known then."""
        query, *new = self.heads(params, x, positions)
        keys, values = (_remember(*pair, positions) for pair in zip(known, new, strict=True))
        mixed = _mix(query, keys, values, _visible(positions, self.length, self.window))
        out = params["linear_proj"]
        made = jnp.einsum("blnh,nhd->bld", mixed, out["kernel"].astype(self.dtype))
        return made + out["bias"].astype(self.dtype) if "bias" in out else made, (keys, values)


def _blocks(params: Any, count: int) -> list[Any]:
    """Return the parameters of each block, whether they are stacked or apart."""
    if "layers" in params:
        return [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(count)]
    return [params[f"layers_{i}"] for i in range(count)]


def _visible(positions: jax.Array, length: int, window: int) -> jax.Array:
    """Return which cached positions tokens see, bool [batch, 1, tokens, length]."""
    own, others = positions[:, None, :, None], jnp.arange(length)
    seen = others <= own
    return seen & (own - others < window) if window else seen


def _remember(known: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """Return cached keys or values, [batch, length, heads, head_size], with those of positions."""
    rows = jnp.arange(new.shape[0])[:, None]
    return known.at[rows, positions].set(new.astype(known.dtype), mode="drop")


def _mix(query: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array) -> jax.Array:
    """Return what attention mixes, [batch, tokens, heads, head_size]; heads may share keys.

    Args:
        query: [batch, tokens, heads, head_size].
        keys: [batch, length, kv_heads, head_size].
        values: as `keys`.
        seen: as `_visible` returns it.
    """
    shared = query.shape[2] // keys.shape[2]
    keys, values = (jnp.repeat(x, shared, axis=2) for x in (keys, values))
    scores = jnp.einsum("bqnh,bknh->bnqk", query * query.shape[-1] ** -0.5, keys)
    scores = jnp.where(seen, scores.astype(jnp.float32), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("bnqk,bknh->bqnh", weights, values)
