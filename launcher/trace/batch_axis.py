"""The batch axis: which axis of a value computed from the batch has one example after another.

An input of the loss that is computed from the batch is computed once, on the whole batch, and cut
into slices afterwards. A slice then holds what belongs to its examples only if position `i` along
the cut axis belongs to example `i` (or to a run of examples, in order): after a transpose, yes;
after a reversal, no. That is what a factor says: cut along it, each part of the result is computed
from the same part of the operands. What cannot be shown to keep the examples in order counts as not
keeping them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from launcher.trace.bodies import alternatives
from launcher.trace.factors import Factor, factors
from launcher.trace.jaxpr import Equation, Jaxpr, Var, is_var
from launcher.trace.primitive_kinds import BARRIERS, UNSHARDED_ELEMENTWISE


@dataclass(frozen=True, eq=False)
class NoBatchAxis:
    """The value depends on the batch, and this equation left its examples without an order."""

    equation: Equation


# The axis of a value that holds the examples; None: the value does not depend on the batch.
BatchAxis: TypeAlias = int | NoBatchAxis | None


def follow_batch_axis(
    equations: Iterable[Equation], sources: Mapping[Var, BatchAxis]
) -> dict[Var, BatchAxis]:
    """Return the batch axis of every value that depends on `sources`, whose axes are given."""
    found: dict[Var, BatchAxis] = dict(sources)
    for eqn in equations:
        axes = [found.get(v) if is_var(v) else None for v in eqn.invars]
        if any(axis is not None for axis in axes):
            found.update(zip(eqn.outvars, _after(eqn, axes), strict=True))
    return found


def _after(eqn: Equation, axes: Sequence[BatchAxis]) -> Sequence[BatchAxis]:
    """Return the batch axis of each result, by those of the operands.

    An operand without one does not matter beside others that have one: it is computed on the whole
    batch, as the result is.
    """
    programs = alternatives(eqn)
    if programs:
        each = [_through(jaxpr, axes[len(axes) - len(jaxpr.invars) :]) for jaxpr in programs]
        return [_joined(found, NoBatchAxis(eqn)) for found in zip(*each, strict=True)]
    if eqn.primitive.name in BARRIERS:
        return axes
    places = {(i, axis) for i, axis in enumerate(axes) if isinstance(axis, int)}
    if not places:
        lost = next(axis for axis in axes if axis is not None)
        return [lost] * len(eqn.outvars)
    if eqn.primitive.name == "scan":
        return [0 if _maps_over(eqn, axes) else NoBatchAxis(eqn)] * len(eqn.outvars)
    along = [f for f in _factors(eqn) if places <= set(f.operands) and not f.indexed]
    kept = {j: int(d) for j, d in along[0].results} if along else {}  # NumPy's, of a gather
    return [kept.get(j, NoBatchAxis(eqn)) for j in range(len(eqn.outvars))]


def _through(jaxpr: Jaxpr, axes: Sequence[BatchAxis]) -> list[BatchAxis]:
    sources = {v: a for v, a in zip(jaxpr.invars, axes, strict=True) if a is not None}
    found = follow_batch_axis(jaxpr.eqns, sources)
    return [found.get(v) if is_var(v) else None for v in jaxpr.outvars]


def _joined(found: Sequence[BatchAxis], otherwise: NoBatchAxis) -> BatchAxis:
    known = {axis for axis in found if axis is not None}
    return known.pop() if len(known) == 1 else otherwise if known else None


def _maps_over(eqn: Equation, axes: Sequence[BatchAxis]) -> bool:
    """Whether a loop over the examples hands nothing on from one to the next (`jax.lax.map`)."""
    constants = axes[: eqn.params["num_consts"]]
    by_axis = {axis for axis in axes if isinstance(axis, int)}
    alone = eqn.params["num_carry"] == 0 and not any(isinstance(c, int) for c in constants)
    return alone and by_axis == {0}


def _factors(eqn: Equation) -> Sequence[Factor]:
    """Return an equation's factors, and those of a few primitives that sharding leaves whole."""
    ranks = [v.aval.ndim for v in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name in UNSHARDED_ELEMENTWISE:
        return _leading(eqn, min(rank for rank in ranks if rank) if any(ranks) else 0)
    if eqn.primitive.name == "fft":
        return _leading(eqn, ranks[0] - len(eqn.params["fft_lengths"]))
    return factors(eqn) or ()


def _leading(eqn: Equation, count: int) -> list[Factor]:
    """Return factors along the leading dimensions of results and of the operands that have them."""
    lengths = eqn.outvars[0].aval.shape[:count]
    ins = [i for i, v in enumerate(eqn.invars) if v.aval.shape[:count] == lengths]
    outs = range(len(eqn.outvars))
    return [Factor(tuple((i, d) for i in ins), tuple((j, d) for j in outs)) for d in range(count)]
