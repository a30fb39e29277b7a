"""Rows that hold several documents: what a batch tells of them, and who may see whom."""

from __future__ import annotations

from typing import Any

import jax

# Of each token its document's number and its place in that, int32 [batch, length] each.
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
