"""Combine the slices' results of a loss into those on the whole batch, or refuse.

The word for each result is read off its relation; what the user says is checked against it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from launcher.trace.errors import BatchError, JoinedError, ReduceError
from launcher.trace.ir.jaxpr import Equation, source_line
from launcher.trace.slicing.relations import (
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
        name = _name(i, whole)
        if said == "last":
            _check_last(name, whole.outvars[i].aval.shape, part.outvars[i].aval.shape)
            words.append(said)
            continue
        a, b = whole.outvars[i].aval, part.outvars[i].aval
        is_averaged = jnp.issubdtype(a.dtype, jnp.inexact) and a.shape == b.shape
        word = _word(name, relation, num_slices, is_averaged)
        if part.params["wrt"] and i == 0:
            word = _of_loss(word, relation, num_slices)
        _check_said(name, said, word, relation)
        if said == "sum" and isinstance(relation, PerSlice):
            word = said
        words.append(word)
    return tuple(words)


def _name(result: int, whole: Equation) -> str:
    if result == 0 and whole.params["wrt"]:
        return "the loss"
    return f"result {result} of the loss"


def _of_loss(word: str, relation: SliceRelation, num_slices: int) -> str:
    """Return how the loss is combined, and with it the gradients."""
    if isinstance(relation, Partial) and not relation.linear:
        eqn = relation.equation
        raise JoinedError(
            f"the loss takes the {word} over the examples at {source_line(eqn)}, so that its "
            f"gradient belongs to one of {num_slices} slices of the batch (microbatches × "
            "data-parallel replicas). Ask for one microbatch, or for a mean or a sum",
            f"the loss takes the {word} over the examples at {source_line(eqn)}",
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
    if isinstance(relation, RowNumbers):
        remedy = "it numbers the rows: number them outside of the loss"
    raise BatchError(f"{name} cannot be combined from {num_slices} slices of the batch; {remedy}")


def _check_said(name: str, said: str, word: str, relation: SliceRelation) -> None:
    if said in ("infer", word):
        return
    if said == "sum" and isinstance(relation, PerSlice):
        return
    if said != "concat" and isinstance(relation, Replicated):
        return  # computed on the whole batch, or the same in every slice
    if isinstance(relation, Partial):
        where = source_line(relation.equation)
        if said == "mean" and word == "sum" and relation.scaled:
            return  # divided by a number of its own: a mean in the user's words
        what = {
            "mean": "a mean over the examples",
            "sum": "a sum over the examples",
            "max": "the largest of the examples",
            "min": "the smallest of the examples",
        }[word]
    else:
        where, what = "", {"concat": "a row of each example"}.get(word, "the same for all slices")
    at = f", reduced at {where}" if where else ""
    raise ReduceError(
        f'{name} is {what}{at}, but reduce="{said}" is given for it; say "{word}", or leave reduce '
        "out"
    )


def _check_last(name: str, whole: Sequence[int], part: Sequence[int]) -> None:
    if tuple(whole) != tuple(part):
        raise BatchError(
            f'{name} grows with the batch, and reduce="last" would keep one slice\'s rows; say '
            '"concat", or leave reduce out'
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
