"""The loss of a decoder-only model, and its decoder: attention over cached keys and values.

A family's attention calls `attend_cached` where `has_cache` says so; all else it computes in
decoding as in training.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from launcher.recipes.models.blocks import applied
from launcher.recipes.models.decoding import Decoder
from launcher.recipes.models.losses import Metrics, next_token_loss, output_matrix
from launcher.recipes.protocols import Model

# Each token's document number and its position in the document, int32 [batch, length].
Packed = tuple[jax.Array, jax.Array] | None


def packing_of(batch: Any) -> Packed:
    """Return the documents of a batch's rows; None where a row is one text."""
    return (batch["segments"], batch["positions"]) if "segments" in batch else None


def same_document(segments: jax.Array) -> jax.Array:
    """Return which tokens may see which, bool [batch, 1, length, length]: those of one document.

    Args:
        segments: the number of each token's document, int32 [batch, length].
    """
    return segments[:, None, :, None] == segments[:, None, None, :]


_CACHE = "cache"  # the collection of variables


def next_token_model(module: nn.Module, options: Any, draws: bool = False) -> Model:
    """Return a model whose loss is the mean cross-entropy of the next token.

    A batch holds `tokens` and `targets`, int32 [batch, sequence_length]; with `segments` and
    `positions`, which begin at 0 in each document, attention keeps within documents; with `weights`
    the mean is weighted.

    Args:
        module: maps tokens and `packed`, as `packing_of` returns it, to the last hidden values. It
            has a field `dtype`.
        options: its settings, all of them set.
        draws: whether it takes `deterministic` and draws a dropout.
    """

    def how(key: jax.Array | None) -> dict[str, Any]:
        rngs = {} if key is None else {"rngs": {"dropout": key}}
        return {"deterministic": key is None, **rngs} if draws else {}

    def init(key: jax.Array) -> Any:
        return module.init(key, jnp.zeros((1, 1), jnp.int32), **how(None))["params"]

    def loss(params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        hidden = applied(module, params, batch["tokens"], packed=packing_of(batch), **how(key))
        return next_token_loss(hidden, params, batch, options, module.dtype, key is None)

    return Model(init, loss)


def has_cache(module: nn.Module) -> bool:
    """Return whether a module of attention decodes."""
    return module.has_variable(_CACHE, "keys")


def attend_cached(
    module: nn.Module,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    window: int = 0,
) -> jax.Array:
    """Cache the keys and values of new tokens; return attention, [batch, length, heads, size].

    Args:
        module: the module of attention, whose variables hold the cache.
        query: float [batch, length, heads, size].
        key: float [batch, length, kv_heads, size]; heads may share keys.
        value: as `key`.
        positions: of the new tokens in their texts, int32 [batch, length].
        window: how many positions a token sees at most, its own included; 0: all before it.
    """
    rows = jnp.arange(len(positions))[:, None]

    def extended(name: str, new: jax.Array) -> jax.Array:
        old: Any = module.get_variable(_CACHE, name)
        cached = old.at[rows, positions].set(new.astype(old.dtype), mode="drop")
        module.put_variable(_CACHE, name, cached)
        return cached

    keys, values = extended("keys", key), extended("values", value)
    own, others = positions[:, None, :, None], jnp.arange(keys.shape[1])
    seen = others <= own
    if window:
        seen &= own - others < window
    return jax.nn.dot_product_attention(query, keys, values, mask=seen, implementation="xla")


def cached_decoder(model: nn.Module, options: Any, shape: tuple[int, int], **how: Any) -> Decoder:
    """Return the decoder of a language model.

    Args:
        model: maps tokens and `packed`, as `packing_of` returns it, to the last hidden values, or
            to a tuple of these and other results. It has a field `dtype`.
        options: its settings.
        shape: the number of heads of keys and values, and their size.
        how: further arguments of the model.
    """
    length, num_layers, dtype = options.sequence_length, options.num_layers, model.dtype

    def cache(batch: int) -> Any:
        stack = (num_layers,) if options.scan_layers else ()
        empty = jnp.zeros((*stack, batch, length, *shape), dtype)
        names = ["layers"] if options.scan_layers else [f"layers_{i}" for i in range(num_layers)]
        return {name: {"self_attention": {"keys": empty, "values": empty}} for name in names}

    def read(
        params: Any, cache: Any, tokens: jax.Array, start: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, Any]:
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        packed = jnp.zeros_like(positions), positions
        made, new = model.apply(
            {"params": params, _CACHE: cache}, tokens, packed=packed, mutable=_CACHE, **how
        )
        hidden: Any = made[0] if isinstance(made, tuple) else made
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
        logits = hidden @ output_matrix(params).astype(dtype)
        return logits[:, : options.vocab_size].astype(jnp.float32), new[_CACHE]

    return Decoder(cache, read, length)
