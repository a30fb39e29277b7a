"""Arrays joined along the examples, as the real and the fake ones of a GAN.

Slice `s` of such an array holds block `s` of each part, one after the other. Where each row is
treated alone, its place does not matter; between the parts the array may be cut again. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from launcher.trace.ir.jaxpr import Atom, Equation
from launcher.trace.ir.primitive_kinds import BARRIERS
from launcher.trace.slicing.relations import (
    InParts,
    Joined,
    Pair,
    RowNumbers,
    Sharded,
    Sliced,
    SliceRelation,
    is_unordered,
    joined_among,
    same_params,
)


def join_rows(pair: Pair, given: Sequence[SliceRelation]) -> Sliced | None:
    """Return a concatenation of arrays that are each cut into slices; None: it is none."""
    axis = pair.part.params.get("dimension", -1)
    cut = [p for p in given if isinstance(p, Sharded | InParts) and p.axis == axis]
    if pair.name != "concatenate" or len(cut) < len(given):
        return None
    lengths = (_lengths(v, p) for v, p in zip(pair.part.invars, cut, strict=True))
    return pair.all(_of_lengths(axis, list(itertools.chain(*lengths))))


def with_parts(
    pair: Pair,
    given: Sequence[SliceRelation],
    rule: Callable[[Pair, Sequence[SliceRelation]], Sliced],
) -> Sliced:
    """Return the results of an equation whose operands may be in parts.

    Args:
        pair: the equation.
        given: the relation of each operand.
        rule: the equation's rule for operands that are cut into blocks.
    """
    operands = zip(pair.part.invars, given, strict=True)
    kinds = {(p.shares, v.aval.shape[p.axis]) for v, p in operands if isinstance(p, InParts)}
    if not kinds or pair.name in BARRIERS:
        return rule(pair, given)
    if pieces := _cut(pair, given[0]):
        return Sliced(pieces, [pair.part])
    ordered = any(isinstance(p, Sharded | RowNumbers) and not is_unordered(p) for p in given)
    if ordered or len(kinds) > 1:
        return pair.joined()
    ((shares, length),) = kinds
    sliced = rule(pair, [Sharded(p.axis) if isinstance(p, InParts) else p for p in given])

    def again(result: int, relation: SliceRelation) -> SliceRelation:
        if isinstance(relation, Sharded):
            rows = pair.part.outvars[result].aval.shape[relation.axis]
            if rows == length or (pair.name == "reshape" and rows % length == 0):
                return InParts(relation.axis, shares)
        elif not isinstance(pair.by_shape(result), Joined):
            return relation
        return Joined(pair.part)

    return replace(sliced, relations=[again(*each) for each in enumerate(sliced.relations)])


def follows_parts(given: Iterable[SliceRelation], results: Iterable[SliceRelation]) -> bool:
    """Return whether an equation has operands in parts, and slices can compute its results."""
    return any(isinstance(p, InParts) for p in given) and joined_among(results) is None


def _of_lengths(axis: int, lengths: Sequence[int]) -> SliceRelation:
    """Return the relation of an array in parts of these lengths."""
    shares = tuple(n // math.gcd(*lengths) for n in lengths)
    return InParts(axis, shares) if len(shares) > 1 else Sharded(axis)


def _lengths(atom: Atom, relation: InParts | Sharded) -> list[int]:
    """Return the lengths of an array's parts."""
    shares = relation.shares if isinstance(relation, InParts) else (1,)
    return [atom.aval.shape[relation.axis] * n // sum(shares) for n in shares]


def _cut(pair: Pair, operand: SliceRelation) -> list[SliceRelation]:
    """Return the results of an equation that cuts its operand along the parts; none: it does not.

    They are parts if it cuts between them.
    """
    if not isinstance(operand, InParts):
        return []
    alike = pair.name == "split" or same_params(pair)  # the sizes of a split are in `_pieces`
    whole, own = (_pieces(pair.name, eqn, operand) for eqn in (pair.whole, pair.part))
    same = [a if alike and a == b else (0, 0) for a, b in zip(whole, own, strict=True)]
    kept = [operand.shares[first:last] for first, last in same]
    return [_of_lengths(operand.axis, n) if n else Joined(pair.part) for n in kept]


def _pieces(name: str, eqn: Equation, operand: InParts) -> list[tuple[int, int]]:
    """Return of each result its first part and the one after its last; (n, 0): it is no parts."""
    axis, params = operand.axis, eqn.params
    if name == "slice" and (params["strides"] or {axis: 1})[axis] == 1:
        ends = [params["start_indices"][axis], params["limit_indices"][axis]]
    elif name == "split" and params["axis"] == axis:
        ends = [0, *itertools.accumulate(params["sizes"])]
    else:
        return []
    borders = [0, *itertools.accumulate(_lengths(eqn.invars[0], operand))]
    place = {n: k for k, n in enumerate(borders)}
    return [(place.get(n, len(place)), place.get(m, 0)) for n, m in itertools.pairwise(ends)]
