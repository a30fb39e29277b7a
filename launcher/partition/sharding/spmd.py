"""SPMD execution of an equation: what each device reads, computes and all-reduces.

The specs of a program say how values are kept. An equation can follow them as far as its factors
(`trace.factors`) go: an operand that is cut in any other way is gathered first, and a dimension
that is cut and summed over leaves each device with a part of the result. `plan.cost.collectives`
prices this and `runtime` emits some equations so. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from launcher.partition.sharding.named_dims import Axis, Sharding, Spec, Use, axes
from launcher.trace import Place


@dataclass(frozen=True)
class Execution:
    """One equation on each device.

    Attributes:
        ins: the specs of the operands as they are read. outs: of the results, before any sum.
        summed: the axes along which each device has a part of the (first) result.
        kept_ins, kept_outs: the specs by which operands and results are kept.
    """

    ins: tuple[Spec, ...]
    outs: tuple[Spec, ...]
    summed: tuple[str, ...]
    kept_ins: tuple[Spec, ...]
    kept_outs: tuple[Spec, ...]


def execution(use: Use, sharding: Sharding) -> Execution:
    """Return how `use` runs under `sharding`; an unknown equation is computed whole, everywhere."""
    ins = tuple(sharding.spec(v, use.scope) for v in use.eqn.invars)
    outs = tuple(sharding.spec(v, use.scope) for v in use.eqn.outvars)
    if not any(map(any, (*ins, *outs))):
        return Execution(ins, outs, (), ins, outs)
    reads: list[list[list[str]]] = [[[] for _ in spec] for spec in ins]
    makes: list[list[list[str]]] = [[[] for _ in spec] for spec in outs]
    summed: list[str] = []
    factors = use.factors or ()
    sums = [[p for p in f.operands if _is_long(p, use)] for f in factors if not f.results]
    for places in sums:  # what all operands have cut
        for axis in _common([ins[i][d] for i, d in places]):
            summed.append(axis)
            _cut(reads, places, axis)
    for factor in factors:
        for axis in _common([outs[j][d] for j, d in factor.results]):
            if axis not in summed:
                _cut(reads, [p for p in factor.operands if _is_long(p, use)], axis)
                _cut(makes, factor.results, axis)
    for places in sums:  # what some have cut; of the others each device takes its part
        found = {axis: None for i, d in places for axis in axes(ins[i][d])}
        for axis in found:
            elsewhere = {a for i, _ in places for dim in reads[i] for a in dim}
            if axis not in elsewhere and axis not in summed:
                summed.append(axis)
                _cut(reads, places, axis)
    return Execution(
        tuple(map(_spec, reads)), tuple(map(_spec, makes)), tuple(dict.fromkeys(summed)), ins, outs
    )


def _cut(dims: list[list[list[str]]], places: Iterable[Place], axis: str) -> None:
    for i, d in places:
        dims[i][d].append(axis)


def _is_long(place: Place, use: Use) -> bool:
    """Return whether an operand's dimension can be cut: it is not a literal's, or stretched."""
    i, d = place
    shape = use.eqn.invars[i].aval.shape
    return d < len(shape) and shape[d] != 1


def _common(dims: list[Axis]) -> list[str]:
    """Return the axes that all of these dimensions are cut along."""
    if not dims:
        return []
    first, *others = map(axes, dims)
    return [a for a in first if all(a in other for other in others)]


def _spec(dims: list[list[str]]) -> Spec:
    return tuple(d[0] if len(d) == 1 else tuple(d) or None for d in dims)


def cut_axes(spec: Spec) -> set[str]:
    """All axes of a spec."""
    return {a for axis in spec for a in axes(axis)}
