"""Texts of which some tokens are masked, for models that fill them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from recipes import Batch

# From sample numbers to their rows.
Gather = Callable[[np.ndarray], "Batch"]


def as_the_model_takes(model: Any, texts: Gather) -> Gather:
    """Return texts as they are or, for a model whose options have `mask_every`, masked."""
    return masked(model, texts) if hasattr(model, "mask_every") else texts


def masked(model: Any, texts: Gather) -> Gather:
    """Return texts of which one token in `mask_every` is masked, at places of the sample's own.

    The mask is the last token of the vocabulary. As many are masked in each row; `weights`, float32
    [rows, length], is 1 where one is and 0 elsewhere, and `targets` are the tokens themselves.
    """
    length, count = model.sequence_length, max(model.sequence_length // model.mask_every, 1)

    def gather(which: np.ndarray) -> Batch:
        targets = texts(which)["tokens"]
        weights = np.zeros(targets.shape, np.float32)
        for row, sample in enumerate(which):
            places = np.random.default_rng([2, sample]).permutation(length)[:count]
            weights[row, places] = 1
        tokens = np.where(weights > 0, model.vocab_size - 1, targets).astype(np.int32)
        return {"tokens": tokens, "targets": targets, "weights": weights}

    return gather
