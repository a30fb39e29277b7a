"""Rules for the relations of an equation's results, given those of its operands.

An equation is looked at twice: as traced on the whole batch, and as traced on one slice. Its
factors (`factors`) say which dimensions run together; a number that differs between the two traces
is one that the batch size decides. Linear functions of partial results are partial results; where a
sum meets a value that all slices share, or a mean, the slice's program is changed so that nothing
counts more than once. Equations with inner programs are in `follow_relations`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from launcher.trace.ir.factors import Factor, factors
from launcher.trace.ir.jaxpr import Atom, Equation, Literal, Var, is_var, make_jaxpr
from launcher.trace.ir.primitive_kinds import (
    BARRIERS,
    CASES,
    DRAWS,
    EXTREMA,
    KEY_MAKERS,
    LINEAR_IN_FIRST,
    MATRIX_DIMS,
    PARTIAL_SUMS,
    RANDOM,
    SAME_FOR_EXTREMA,
    SCALING,
    UNSHARDED_ELEMENTWISE,
)
from launcher.trace.slicing.relations import (
    Joined,
    Pair,
    Partial,
    PerSlice,
    Replicated,
    RowNumbers,
    Sharded,
    Sliced,
    SliceRelation,
    joined_among,
)


def relate(pair: Pair, given: Sequence[SliceRelation]) -> Sliced:
    """Return the relations of the results of an equation without inner programs.

    Args:
        pair: the equation.
        given: the relation of each operand.
    """
    count = len(pair.part.outvars)
    if pair.name == "select_n" and given[0] == Replicated(zero=True):
        predicate, case = pair.part.invars[:2]  # the others are never taken
        cases = [case] * (len(given) - 1)
        # The same value, so not changed.
        return Sliced([given[1]], [pair.part.replace(invars=[predicate, *cases])])
    lost = joined_among(given)
    if lost is not None:
        return Sliced([lost] * count, [pair.part])
    if pair.name in BARRIERS:
        return Sliced(list(given), [pair.part])
    if any(isinstance(p, RowNumbers) for p in given):
        row = of_row_numbers(pair, given) if count == 1 else Joined(pair.part)
        return Sliced([row] * count, [pair.part])
    if any(isinstance(p, Partial) for p in given) and _any_grows(pair):
        return Sliced([Joined(pair.part)] * count, [pair.part])  # each row has the total
    if any(isinstance(p, Partial) for p in given) and pair.name in SCALING:
        return scaled(pair, given) or Sliced([Joined(pair.part)], [pair.part])
    if pair.name not in DRAWS and not _same_params(pair):  # a draw's shape is that for one key
        return Sliced([Joined(pair.part)] * count, [pair.part])
    numbered = pair.with_whole_numbers()
    sliced = _related(numbered, given)
    return replace(sliced, changed=sliced.changed or numbered is not pair)


def _any_grows(pair: Pair) -> bool:
    results = zip(pair.whole.outvars, pair.part.outvars, strict=True)
    return any(a.aval.shape != b.aval.shape for a, b in results)


def _related(pair: Pair, given: Sequence[SliceRelation]) -> Sliced:
    results = range(len(pair.part.outvars))
    if any(isinstance(p, Partial) for p in given):
        return of_partial(pair, given)
    if any(isinstance(p, Sharded) for p in given):
        return Sliced([_of_shards(pair, given, j) for j in results], [pair.part])
    if any(isinstance(p, PerSlice) for p in given):
        return Sliced([own_value(pair, j) for j in results], [pair.part])
    return Sliced([_of_replicated(pair, given, j) for j in results], [pair.part])


def own_value(pair: Pair, result: int) -> SliceRelation:
    """Return the relation of a result that is meant of the slice alone."""
    try:
        axis = pair.growth(result)
    except ValueError:  # such as a capacity, rounded up
        axis = None
    return PerSlice() if axis is None else Sharded(axis)


def _of_replicated(pair: Pair, given: Sequence[SliceRelation], result: int) -> SliceRelation:
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


def _is_zero(pair: Pair, given: Sequence[SliceRelation]) -> bool:
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


def _of_shards(pair: Pair, given: Sequence[SliceRelation], result: int) -> SliceRelation:
    """Return the relation by the factor that holds every operand's sharded dimension."""
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


def _reduced(pair: Pair, given: Sequence[SliceRelation]) -> SliceRelation:
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


def of_partial(pair: Pair, given: Sequence[SliceRelation]) -> Sliced:
    """Return the relation of partial results: they stay so under linear functions."""
    partial = [(i, p) for i, p in enumerate(given) if isinstance(p, Partial)]
    first = partial[0][1]
    lost = Sliced([Joined(pair.part)] * len(pair.part.outvars), [pair.part])
    own = any(isinstance(p, Sharded | PerSlice) for p in given)
    if own and not _adds_own(pair, given):
        return lost
    if not first.linear:
        same = {p.op for _, p in partial} == {first.op}
        known = SAME_FOR_EXTREMA | ({first.op} if len(given) > 1 else set())
        return (
            Sliced([first] * len(pair.part.outvars), [pair.part])
            if (same and pair.name in known)
            else lost
        )
    if any(not jnp.issubdtype(v.aval.dtype, jnp.number) for v in pair.part.outvars):
        return lost
    if pair.name in CASES:
        return _aligned(pair, given) or lost
    if pair.name == "dot_general" and len(partial) == 1:
        return Sliced([replace(first, scaled=True)], [pair.part])
    if pair.name in LINEAR_IN_FIRST and [i for i, _ in partial] == [0]:
        floats = [
            jnp.issubdtype(v.aval.dtype, jnp.inexact)
            for v in (pair.part.invars[0], pair.part.outvars[0])
        ]
        rounds = floats[0] and not floats[1]
        pads = pair.name == "pad" and given[1] != Replicated(zero=True)
        return (
            lost
            if rounds or pads or fills(pair.part)
            else Sliced([first] * len(pair.part.outvars), [pair.part])
        )
    return lost


def fills(eqn: Equation) -> bool:
    """Return whether a look-up puts a number of its own where an index is out of bounds."""
    return bool(eqn.params.get("fill_value"))


def _adds_own(pair: Pair, given: Sequence[SliceRelation]) -> bool:
    """Return whether a partial result and a slice's own value are added: a mean of the latter."""
    return pair.name in ("add", "sub") and not any(isinstance(p, Sharded) for p in given)


def scaled(pair: Pair, given: Sequence[SliceRelation]) -> Sliced | None:
    """Return a partial result times, or over, a value that all slices share."""
    whole, part = pair.whole, pair.part
    at = 0 if isinstance(given[0], Partial) else 1
    partial, other = given[at], given[1 - at]
    inexact = jnp.issubdtype(part.outvars[0].aval.dtype, jnp.inexact)
    if not isinstance(other, Replicated) or (pair.name == "div" and (at or not inexact)):
        return None
    assert isinstance(partial, Partial)
    if not partial.linear:
        return None  # a negative factor makes the smallest of the largest
    kept = replace(partial, scaled=True)
    if not pair.differs(1 - at):
        return Sliced([kept], [part])
    a, b = whole.invars[1 - at], part.invars[1 - at]
    assert isinstance(a, Literal)
    assert isinstance(b, Literal)
    large, small = (a.val, b.val) if pair.name == "div" else (b.val, a.val)
    share = pair.num_slices * float(small)
    if partial.op == "sum" and np.isclose(float(large), share, rtol=1e-6, atol=0):
        return Sliced([replace(kept, op="mean")], [part])  # divided by the number of its examples
    return Sliced([kept], [pair.with_whole_numbers().part], changed=True)


def _aligned(pair: Pair, given: Sequence[SliceRelation]) -> Sliced | None:
    """Return a sum, or one of several cases, with its operands made the same kind of partial.

    Beside a mean, a sum counts as often as there are slices; beside a sum, what all slices share
    counts once if each adds its share of it.
    """
    cases = range(1 if pair.name == "select_n" else 0, len(given))
    if pair.name == "select_n" and not isinstance(given[0], Replicated):
        return None
    mean = any(given[i] == Partial("mean", pair.part) or given[i] == PerSlice() for i in cases)
    invars: list[Atom] = list(pair.part.invars)
    extra: list[Equation] = []
    for i in cases:
        own = given[i]
        if isinstance(own, Partial) and not own.linear:
            return None
        is_sum = isinstance(own, Partial) and own.op == "sum"
        if own == Replicated(zero=True) or is_sum != mean:
            continue
        if not jnp.issubdtype(invars[i].aval.dtype, jnp.inexact):
            return None
        factor = float(pair.num_slices) if mean else 1.0 / pair.num_slices
        eqn = _times(pair.part, invars[i], factor)
        extra.append(eqn)
        invars[i] = eqn.outvars[0]
    sums = [p for p in given if isinstance(p, Partial)]
    kind = Partial("mean" if mean else "sum", sums[0].equation, any(p.scaled for p in sums))
    return Sliced([kind], [*extra, pair.part.replace(invars=invars)], changed=bool(extra))


def _times(eqn: Equation, atom: Atom, factor: float) -> Equation:
    """Return the equation that scales an operand of `eqn`."""
    value = jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
    closed = make_jaxpr(lambda x: x * np.asarray(factor, x.dtype), value)
    made = closed.eqns[0]
    renamed = [atom if is_var(v) else v for v in made.invars]
    out = Var(made.outvars[0].aval)
    return made.replace(invars=renamed, outvars=[out], source_info=eqn.source_info)


def of_row_numbers(pair: Pair, given: Sequence[SliceRelation]) -> SliceRelation:
    """Return the relation of row numbers: they may only look up the rows that they count.

    That is `values[jnp.arange(rows), labels]`: a comparison with 0, a choice, columns side by side,
    and a gather.
    """
    at, rows = next((i, p) for i, p in enumerate(given) if isinstance(p, RowNumbers))
    eqn = pair.whole
    try:
        grown = pair.growth(0)
    except ValueError:
        return Joined(pair.part)
    if pair.name == "lt" and at == 0 and given[1] == Replicated(zero=True):
        return Replicated(zero=True)  # none is negative
    if pair.name == "gather" and at == 1:
        return _looked_up(pair, given[0], rows)
    if grown is None:
        return Joined(pair.part)
    if pair.name == "concatenate":
        last = eqn.outvars[0].aval.ndim - 1
        widths = [v.aval.shape[-1] for v in eqn.invars]
        if eqn.params["dimension"] == last != rows.axis and widths[at] == 1:
            return RowNumbers(grown, sum(widths[:at]))
    if pair.name == "reshape" and _without_ones(eqn.invars[at]) != _without_ones(eqn.outvars[0]):
        return Joined(pair.part)  # pairs of rows, or rows by turns
    integer = jnp.issubdtype(pair.part.outvars[0].aval.dtype, jnp.integer)
    if pair.name in SAME_FOR_EXTREMA | {"convert_element_type"} and integer:
        return (
            RowNumbers(grown) if rows.column is None and pair.name != "rev" else Joined(pair.part)
        )
    return Joined(pair.part)


def _without_ones(atom: Atom) -> list[int]:
    return [d for d in atom.aval.shape if d != 1]


def _looked_up(pair: Pair, operand: SliceRelation, rows: RowNumbers) -> SliceRelation:
    """Return the relation of `operand[rows, ...]`."""
    numbers = pair.whole.params["dimension_numbers"]
    column = 0 if rows.column is None else rows.column
    along = numbers.start_index_map[column]
    result = pair.whole.outvars[0].aval.ndim
    batch = [d for d in range(result) if d not in numbers.offset_dims]
    counts = pair.whole.invars[1].aval.shape[rows.axis]  # all rows, not those of the first half
    if pair.whole.invars[0].aval.shape[along] != counts:
        return Joined(pair.part)
    alone = rows.column is not None or pair.whole.invars[1].aval.shape[-1] == 1
    if alone and operand == Sharded(along) and along in numbers.collapsed_slice_dims:
        return Sharded(batch[rows.axis])
    return Joined(pair.part)
