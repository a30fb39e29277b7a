"""Reductions that combine the slices' results of a loss into those on the whole batch.

The word for each result follows from its relation; the user's `reduce` is checked against it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from launcher.trace.errors import BatchError, JoinedError, ReduceError
from launcher.trace.ir.jaxpr import Equation, source_line
from launcher.trace.slicing.relations import (
    InParts,
    Joined,
    Partial,
    PerSlice,
    Replicated,
    RowNumbers,
    Sharded,
    SliceRelation,
)


def reductions(
    whole: Equation, part: Equation, found: Sequence[SliceRelation], num_slices: int
) -> tuple[str, ...]:
    """Return how each result of the loss is combined, by a word of `primitives.REDUCTIONS`.

    Args:
        whole: the loss's equation on the whole batch.
        part: the loss's equation on a slice.
        found: the relations of its results.
        num_slices: how many slices.

    Raises:
        BatchError: slices cannot compute a result, or it is not what the user says.
    """
    words = []
    for i, (said, relation) in enumerate(zip(part.params["reduce"], found, strict=True)):
        is_loss = i == 0 and bool(part.params["wrt"])
        name = "the loss" if is_loss else f"result {i} of the loss"
        a, b = whole.outvars[i].aval, part.outvars[i].aval
        if said == "last" and a.shape != b.shape:
            raise BatchError(
                f'{name} grows with the batch, and reduce="last" would keep one slice\'s rows; say '
                '"concat", or leave reduce out'
            )
        if said == "last":
            words.append(said)
            continue
        is_averaged = jnp.issubdtype(a.dtype, jnp.inexact) and a.shape == b.shape
        word = _word(name, relation, num_slices, is_averaged)
        word = _of_loss(word, relation, num_slices) if is_loss else word
        _check_said(name, said, word, relation)
        words.append(said if said == "sum" and isinstance(relation, PerSlice) else word)
    return tuple(words)


def _of_loss(word: str, relation: SliceRelation, num_slices: int) -> str:
    """Return how the loss is combined, and with it the gradients."""
    if isinstance(relation, Partial) and not relation.linear:
        cause = f"the loss takes the {word} over the examples at {source_line(relation.equation)}"
        raise JoinedError(
            f"{cause}, so that its gradient belongs to one of {num_slices} slices of the batch "
            "(microbatches × data-parallel replicas). Ask for one microbatch, or for a mean or a "
            "sum",
            cause,
        )
    return "mean" if word == "last" else word  # one of the parameters alone is its own mean


def _word(name: str, relation: SliceRelation, num_slices: int, is_averaged: bool) -> str:
    if isinstance(relation, Partial):
        return relation.op
    if isinstance(relation, Replicated):
        return "last"
    if isinstance(relation, PerSlice) and is_averaged:
        return "mean"
    if relation == Sharded(0):
        return "concat"
    if isinstance(relation, Joined):
        raise JoinedError(
            f"{name} is not a mean, a sum or a row of each example: {relation.in_words} "
            f"joins examples, of which each of {num_slices} slices of the batch "
            "(microbatches × data-parallel replicas) sees only its own. Ask for one microbatch, "
            "compute it from the batch alone, or mark the function with "
            "launcher.per_slice if a slice's own value is meant",
            f"{relation.in_words} joins examples",
        )
    remedy = 'say reduce="last", or return a floating-point number of a fixed shape'
    if isinstance(relation, Sharded):
        remedy = "transpose it, so that the examples come first"
    if isinstance(relation, InParts):
        remedy = "return each of the arrays that it joins as a result of its own"
    if isinstance(relation, RowNumbers):
        remedy = "it numbers the rows: number them outside of the loss"
    raise BatchError(f"{name} cannot be combined from {num_slices} slices of the batch; {remedy}")


_MEANINGS = {
    "mean": "a mean over the examples",
    "sum": "a sum over the examples",
    "max": "the largest of the examples",
    "min": "the smallest of the examples",
    "concat": "a row of each example",
    "last": "the same for all slices",
}


def _check_said(name: str, said: str, word: str, relation: SliceRelation) -> None:
    """Refuse a `reduce` that contradicts the relation."""
    if said in ("infer", word) or (said == "sum" and isinstance(relation, PerSlice)):
        return
    if said != "concat" and isinstance(relation, Replicated):
        return  # computed on the whole batch, or the same in every slice
    where = ""
    if isinstance(relation, Partial):
        if said == "mean" and word == "sum" and relation.scaled:
            return  # divided by a number of its own: a mean in the user's words
        where = f", reduced at {source_line(relation.equation)}"
    raise ReduceError(
        f'{name} is {_MEANINGS[word]}{where}, but reduce="{said}" was given; say "{word}", or '
        "leave reduce out"
    )


def check_same_results(whole: Equation, part: Equation) -> None:
    """Refuse a loss with other operands or results on a slice than on the whole batch."""
    for what, word in (("invars", "inputs"), ("outvars", "results")):
        counts = len(getattr(whole, what)), len(getattr(part, what))
        if counts[0] != counts[1]:
            raise BatchError(
                f"the loss at {source_line(whole)} has {counts[0]} {word} on the whole batch and "
                f"{counts[1]} on a slice; what it computes may not depend on the batch size"
            )
