"""Texts of which some tokens are masked, for models that fill them in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from launcher.config.families import taken_by
from launcher.recipes.protocols import Batch, InputError

# From sample numbers to their rows.
Gather = Callable[[np.ndarray], "Batch"]


def check_takes_text(options: Any, model: Any, what: str) -> None:
    """Raise InputError if a model takes no text; `what`: the contents of the dataset."""
    if taken_by(model) != "text":
        raise InputError(
            f"dataset.name={options.name} holds {what}, which model.name={model.name} "
            "does not take; choose model=gpt or dataset=synthetic"
        )


def as_the_model_takes(model: Any, texts: Gather, mask_token: int | None = None) -> Gather:
    """Return texts as they are or, for a model whose options have `mask_every`, masked.

    Args:
        model: the model's settings.
        texts: what makes rows of tokens.
        mask_token: the tokenizer's own; None: it has none.
    """
    if not hasattr(model, "mask_every"):
        return texts
    return masked(model, texts, mask_token_of(model, mask_token))


def mask_token_of(model: Any, mask_token: int | None) -> int:
    """Return the mask: as the model's settings say, the tokenizer's, or the vocabulary's last."""
    said = getattr(model, "mask_token", None)
    found = mask_token if said is None else said
    return int(model.vocab_size - 1 if found is None else found)


def with_mask_token(model: Any, mask_token: int | None) -> Any:
    """Return a model's settings with its mask said, if they have one; see `mask_token_of`."""
    if not hasattr(model, "mask_token"):
        return model
    return dataclasses.replace(model, mask_token=mask_token_of(model, mask_token))


def masked(model: Any, texts: Gather, mask: int) -> Gather:
    """Return texts of which one token in `mask_every` is `mask`, at places of the sample's own.

    As many are masked in each row; `weights`, float32 [rows, length], is 1 where one is and 0
    elsewhere, and `targets` are the tokens themselves.
    """
    length, count = model.sequence_length, max(model.sequence_length // model.mask_every, 1)

    def gather(which: np.ndarray) -> Batch:
        targets = texts(which)["tokens"]
        weights = np.zeros(targets.shape, np.float32)
        for row, sample in enumerate(which):
            places = np.random.default_rng([2, sample]).permutation(length)[:count]
            weights[row, places] = 1
        tokens = np.where(weights > 0, mask, targets).astype(np.int32)
        return {"tokens": tokens, "targets": targets, "weights": weights}

    return gather
