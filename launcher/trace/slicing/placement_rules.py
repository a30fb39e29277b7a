"""The placement of an equation's results by those of its operands: one rule a kind of placement.

An equation is looked at twice: as traced on the whole batch, and as traced on one slice. Its
factors (`factors`) say which dimensions run together; a number that differs between the two traces
is one that the batch size decides. Equations with inner programs are in `follow_placements`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launcher.trace.ir.factors import Factor, factors
from launcher.trace.ir.jaxpr import Equation
from launcher.trace.ir.primitive_kinds import (
    BARRIERS,
    DRAWS,
    EXTREMA,
    KEY_MAKERS,
    LINEAR_IN_FIRST,
    MATRIX_DIMS,
    PARTIAL_SUMS,
    RANDOM,
    SCALING,
    UNSHARDED_ELEMENTWISE,
)
from launcher.trace.slicing.pairs import Pair, Placed
from launcher.trace.slicing.partial_rules import fills, of_partial, scaled
from launcher.trace.slicing.placements import (
    Joined,
    Partial,
    PerSlice,
    Placement,
    Replicated,
    RowNumbers,
    Sharded,
    joined_among,
)
from launcher.trace.slicing.row_numbers import of_row_numbers


def place(pair: Pair, given: Sequence[Placement]) -> Placed:
    """Return the placements of the results of an equation without inner programs.

    Args:
        pair: the equation.
        given: the placement of each operand.
    """
    count = len(pair.part.outvars)
    if pair.name == "select_n" and given[0] == Replicated(zero=True):
        predicate, case = pair.part.invars[:2]  # the others are never taken
        cases = [case] * (len(given) - 1)
        # The same value, so not changed.
        return Placed([given[1]], [pair.part.replace(invars=[predicate, *cases])])
    lost = joined_among(given)
    if lost is not None:
        return Placed([lost] * count, [pair.part])
    if pair.name in BARRIERS:
        return Placed(list(given), [pair.part])
    if any(isinstance(p, RowNumbers) for p in given):
        row = of_row_numbers(pair, given) if count == 1 else Joined(pair.part)
        return Placed([row] * count, [pair.part])
    if any(isinstance(p, Partial) for p in given) and _any_grows(pair):
        return Placed([Joined(pair.part)] * count, [pair.part])  # each row has the total
    if any(isinstance(p, Partial) for p in given) and pair.name in SCALING:
        return scaled(pair, given) or Placed([Joined(pair.part)], [pair.part])
    if pair.name not in DRAWS and not _same_params(pair):  # a draw's shape is that for one key
        return Placed([Joined(pair.part)] * count, [pair.part])
    numbered = pair.with_whole_numbers()
    placed = _placed(numbered, given)
    return replace(placed, changed=placed.changed or numbered is not pair)


def _any_grows(pair: Pair) -> bool:
    results = zip(pair.whole.outvars, pair.part.outvars, strict=True)
    return any(a.aval.shape != b.aval.shape for a, b in results)


def _placed(pair: Pair, given: Sequence[Placement]) -> Placed:
    results = range(len(pair.part.outvars))
    if any(isinstance(p, Partial) for p in given):
        return of_partial(pair, given)
    if any(isinstance(p, Sharded) for p in given):
        return Placed([_of_shards(pair, given, j) for j in results], [pair.part])
    if any(isinstance(p, PerSlice) for p in given):
        return Placed([own_value(pair, j) for j in results], [pair.part])
    return Placed([_of_replicated(pair, given, j) for j in results], [pair.part])


def own_value(pair: Pair, result: int) -> Placement:
    """Return the placement of a result that is meant of the slice alone."""
    try:
        axis = pair.growth(result)
    except ValueError:  # such as a capacity, rounded up
        axis = None
    return PerSlice() if axis is None else Sharded(axis)


def _of_replicated(pair: Pair, given: Sequence[Placement], result: int) -> Placement:
    try:
        axis = pair.growth(result)
    except ValueError:
        return Joined(pair.part)
    if axis is None:
        if pair.name in KEY_MAKERS:
            return Joined(pair.part)  # every slice would draw the same numbers
        return Replicated(_is_zero(pair, given))
    if pair.name == "broadcast_in_dim":
        dims = list(pair.whole.params["broadcast_dimensions"])
        repeated = axis not in dims or pair.whole.invars[0].aval.shape[dims.index(axis)] == 1
        return Sharded(axis) if repeated else Joined(pair.part)
    if pair.name == "iota":
        return RowNumbers(axis) if axis == pair.part.params["dimension"] else Sharded(axis)
    return Sharded(axis) if pair.name in RANDOM else Joined(pair.part)


def _is_zero(pair: Pair, given: Sequence[Placement]) -> bool:
    """Return whether a result is the form of a zero: of what a sum starts from."""
    return (
        pair.name in LINEAR_IN_FIRST
        and given[0] == Replicated(zero=True)
        and (pair.name != "pad" or given[1] == Replicated(zero=True))
        and not fills(pair.part)
    )


def _same_params(pair: Pair) -> bool:
    """Return whether an equation's own numbers differ only along axes that grow with the batch."""
    atoms = (*pair.whole.invars, *pair.whole.outvars), (*pair.part.invars, *pair.part.outvars)
    shapes = [(a.aval.shape, b.aval.shape) for a, b in zip(*atoms, strict=True)]
    grown = {d for a, b in shapes for d, (x, y) in enumerate(zip(a, b, strict=False)) if x != y}
    for name, a in pair.whole.params.items():
        b = pair.part.params.get(name)
        if isinstance(a, int) and a != b:
            return False
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            places = [d for d, (x, y) in enumerate(zip(a, b, strict=True)) if _differ(x, y)]
            if not grown.issuperset(places):
                return False
    return True


def _differ(a: object, b: object) -> bool:
    """Return whether two numbers, or rows of numbers, differ; of anything else, False."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) != len(b) or any(map(_differ, a, b))
    return isinstance(a, int) and isinstance(b, int) and a != b


def _of_shards(pair: Pair, given: Sequence[Placement], result: int) -> Placement:
    """Return the placement by the factor that holds every operand's sharded dimension."""
    if pair.name in RANDOM:
        return own_value(pair, result)
    places = {(i, p.axis) for i, p in enumerate(given) if isinstance(p, Sharded)}
    along = [f for f in row_factors(pair.whole) if places <= set(f.operands) and not f.indexed]
    if not along and _is_extremum(pair) and {d for _, d in places} <= set(pair.part.params["axes"]):
        return _reduced(pair, given)
    if not along:
        return Joined(pair.part)
    axis = next((int(d) for j, d in along[0].results if j == result), None)
    try:
        grown = pair.growth(result)
    except ValueError:
        return Joined(pair.part)
    if grown != axis:
        return Joined(pair.part)
    if axis is not None:
        return Sharded(axis)
    return _reduced(pair, given)


def _is_extremum(pair: Pair) -> bool:
    """Return whether the examples' largest or smallest is taken: of whole numbers, `or` is none."""
    boolean = pair.part.outvars[0].aval.dtype == bool
    return pair.name in EXTREMA and (boolean or pair.name in ("reduce_max", "reduce_min"))


def _reduced(pair: Pair, given: Sequence[Placement]) -> Placement:
    if _is_extremum(pair):
        return Partial(EXTREMA[pair.name], pair.part)
    adds = pair.name in ("scatter-add", "scatter_add") and given[0] == Replicated(zero=True)
    if adds or pair.name in PARTIAL_SUMS:
        return Partial("sum", pair.part)
    return Joined(pair.part)


def row_factors(eqn: Equation) -> Sequence[Factor]:
    """Return an equation's factors, and those of a few primitives that sharding leaves whole."""
    ranks = [v.aval.ndim for v in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name in UNSHARDED_ELEMENTWISE:
        return _leading(eqn, min(rank for rank in ranks if rank) if any(ranks) else 0)
    if eqn.primitive.name in MATRIX_DIMS:
        return _leading(eqn, ranks[0] - MATRIX_DIMS[eqn.primitive.name])
    if eqn.primitive.name == "fft":
        return _leading(eqn, ranks[0] - len(eqn.params["fft_lengths"]))
    return factors(eqn) or ()


def _leading(eqn: Equation, count: int) -> list[Factor]:
    """Return factors along the leading dimensions of results and of the operands that have them."""
    lengths = eqn.outvars[0].aval.shape[:count]
    ins = [i for i, v in enumerate(eqn.invars) if v.aval.shape[:count] == lengths]
    outs = range(len(eqn.outvars))
    return [Factor(tuple((i, d) for i in ins), tuple((j, d) for j in outs)) for d in range(count)]
