"""The loss of the next token, and what a packed batch asks of attention. On one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

# Of rows that hold several documents: `segments` and `positions`, int32 [batch, length] each.
Packed = tuple[jax.Array, jax.Array] | None


def packing_of(batch: Any) -> Packed:
    """Return the documents of a batch's rows; None where a row is one text."""
    return (batch["segments"], batch["positions"]) if "segments" in batch else None


def next_token_loss(losses: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the mean of the tokens' losses, and the metrics beside it.

    Args:
        losses: float32 [batch, length].
        batch: holds `weights`, float32 [batch, length], where some of them count less: the mean is
            then over all weights, and their sum is the metric `weight`.
    """
    if "weights" not in batch:
        return jnp.mean(losses), {}
    weight = jnp.sum(batch["weights"])
    return jnp.sum(losses * batch["weights"]) / jnp.maximum(weight, 1.0), {"weight": weight}


def same_document(segments: jax.Array) -> jax.Array:
    """Return which tokens may see which, bool [batch, 1, length, length]: those of one document.

    Args:
        segments: the number of each token's document, int32 [batch, length].
    """
    return segments[:, None, :, None] == segments[:, None, None, :]
