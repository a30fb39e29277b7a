"""Rows packed with several documents: their numbering and attention mask."""

from __future__ import annotations

from typing import Any

import jax

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
