"""The placement of an equation's results by those of its operands: one rule a kind of placement.

An equation is looked at twice: as traced on the whole batch, and as traced on one slice. The factors
(`factors`) say which dimensions run together; a number that differs between the two traces is one
that the batch size decides. Equations with inner programs are in `follow_placements`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from launcher.trace.factors import Factor, factors
from launcher.trace.jaxpr import Atom, Equation, Literal, Var, is_var, make_jaxpr
from launcher.trace.placements import (
    Joined,
    Partial,
    PerSlice,
    Placement,
    Replicate,
    RowNumbers,
    Shard,
    joined_among,
)
from launcher.trace.primitive_kinds import (
    BARRIERS,
    CASES,
    EXTREMA,
    KEY_MAKERS,
    LINEAR_IN_FIRST,
    PARTIAL_SUMS,
    RANDOM,
    SCALING,
    SAME_FOR_EXTREMA,
    UNSHARDED_ELEMENTWISE,
)


@dataclass(frozen=True, eq=False)
class Pair:
    """An equation on the whole batch, and the same one on one of `num_slices` slices."""

    whole: Equation
    part: Equation
    num_slices: int

    @property
    def name(self) -> str:
        """The primitive's name."""
        return str(self.part.primitive.name)

    def growth(self, result: int) -> int | None:
        """Return the axis along which a result grows with the batch; None if it does not.

        Raises:
            ValueError: it grows in another way than along one axis, in proportion to the batch.
        """
        return grown_axis(
            self.whole.outvars[result].aval.shape,
            self.part.outvars[result].aval.shape,
            self.num_slices,
        )

    def differs(self, operand: int) -> bool:
        """Return whether an operand is a number that the batch size decides."""
        a, b = self.whole.invars[operand], self.part.invars[operand]
        return (
            isinstance(a, Literal)
            and isinstance(b, Literal)
            and not np.array_equal(a.val, b.val, equal_nan=np.ndim(a.val) == 0 and a.val != a.val)
        )

    def with_whole_numbers(self) -> Pair:
        """Return the pair with the whole batch's numbers where the slice's size decides them."""
        if not any(map(self.differs, range(len(self.part.invars)))):
            return self
        given = enumerate(zip(self.whole.invars, self.part.invars, strict=True))
        invars = [a if self.differs(i) else b for i, (a, b) in given]
        return replace(self, part=self.part.replace(invars=invars))


@dataclass(frozen=True, eq=False)
class Placed:
    """What became of an equation.

    Attributes:
        placements: of its results.
        equations: what computes them in a slice; one of them is the equation itself.
        changed: whether they are other than the slice's own.
    """

    placements: Sequence[Placement]
    equations: Sequence[Equation]
    changed: bool = False


def grown_axis(whole: Sequence[int], part: Sequence[int], num_slices: int) -> int | None:
    """Return the axis along which a shape grows with the batch; None if it does not.

    Raises:
        ValueError: it grows in another way than along one axis, in proportion to the batch.
    """
    if tuple(whole) == tuple(part):
        return None
    axes = [d for d, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b]
    if len(whole) != len(part) or len(axes) != 1 or whole[axes[0]] != num_slices * part[axes[0]]:
        raise ValueError(f"{tuple(whole)} and {tuple(part)}")
    return axes[0]


def place(pair: Pair, given: Sequence[Placement]) -> Placed:
    """Return the placements of the results of an equation without inner programs.

    Args:
        pair: the equation.
        given: the placement of each operand.
    """
    count = len(pair.part.outvars)
    if pair.name == "select_n" and given[0] == Replicate(zero=True):
        predicate, case = pair.part.invars[:2]  # the others are never taken
        cases = [case] * (len(given) - 1)
        return Placed([given[1]], [pair.part.replace(invars=[predicate, *cases])], changed=True)
    lost = joined_among(given)
    if lost is not None:
        return Placed([lost] * count, [pair.part])
    if pair.name in BARRIERS:
        return Placed(list(given), [pair.part])
    if any(isinstance(p, RowNumbers) for p in given):
        return Placed([of_row_numbers(pair, given)], [pair.part])
    if any(isinstance(p, Partial) for p in given) and pair.name in SCALING:
        return _scaled(pair, given) or Placed([Joined(pair.part)], [pair.part])
    numbered = pair.with_whole_numbers()
    placed = _placed(numbered, given)
    return replace(placed, changed=placed.changed or numbered is not pair)


def _placed(pair: Pair, given: Sequence[Placement]) -> Placed:
    results = range(len(pair.part.outvars))
    if any(isinstance(p, Partial) for p in given):
        return _of_partial(pair, given)
    if any(isinstance(p, Shard) for p in given):
        return Placed([_of_shards(pair, given, j) for j in results], [pair.part])
    if any(isinstance(p, PerSlice) for p in given):
        return Placed([own_value(pair, j) for j in results], [pair.part])
    return Placed([_of_replicated(pair, given, j) for j in results], [pair.part])


def own_value(pair: Pair, result: int) -> Placement:
    """Return the placement of a result that is meant of the slice alone."""
    try:
        axis = pair.growth(result)
    except ValueError:
        return Joined(pair.part)
    return PerSlice() if axis is None else Shard(axis)


def _of_replicated(pair: Pair, given: Sequence[Placement], result: int) -> Placement:
    try:
        axis = pair.growth(result)
    except ValueError:
        return Joined(pair.part)
    if axis is None:
        if pair.name in KEY_MAKERS:
            return Joined(pair.part)  # every slice would draw the same numbers
        return Replicate(_is_zero(pair, given)) if _same_params(pair) else Joined(pair.part)
    if pair.name == "broadcast_in_dim":
        dims = list(pair.whole.params["broadcast_dimensions"])
        repeated = axis not in dims or pair.whole.invars[0].aval.shape[dims.index(axis)] == 1
        return Shard(axis) if repeated else Joined(pair.part)
    if pair.name == "iota":
        return RowNumbers(axis) if axis == pair.part.params["dimension"] else Shard(axis)
    return Shard(axis) if pair.name in RANDOM else Joined(pair.part)


def _is_zero(pair: Pair, given: Sequence[Placement]) -> bool:
    """Return whether a result is the form of a zero: of what a sum starts from."""
    return (
        pair.name in LINEAR_IN_FIRST
        and given[0] == Replicate(zero=True)
        and (pair.name != "pad" or given[1] == Replicate(zero=True))
    )


def _same_params(pair: Pair) -> bool:
    """Return whether a result of the same shape is computed alike, not from a part that moves."""
    if pair.name not in ("slice", "dynamic_slice", "gather", "pad", "iota"):
        return True
    names = "start_indices", "limit_indices", "strides", "padding_config", "slice_sizes"
    a, b = pair.whole.params, pair.part.params
    return all(a.get(name) == b.get(name) for name in names)


def _of_shards(pair: Pair, given: Sequence[Placement], result: int) -> Placement:
    """Return the placement by the factor that holds every operand's sharded dimension."""
    if pair.name in RANDOM:
        return own_value(pair, result)
    places = {(i, p.axis) for i, p in enumerate(given) if isinstance(p, Shard)}
    along = [f for f in row_factors(pair.whole) if places <= set(f.operands) and not f.indexed]
    if (
        not along
        and pair.name in EXTREMA
        and {d for _, d in places} <= set(pair.part.params["axes"])
    ):
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
        return Shard(axis)
    return _reduced(pair, given)


def _reduced(pair: Pair, given: Sequence[Placement]) -> Placement:
    if pair.name in EXTREMA:
        return Partial(EXTREMA[pair.name], pair.part)
    adds = pair.name in ("scatter-add", "scatter_add") and given[0] == Replicate(zero=True)
    if adds or pair.name in PARTIAL_SUMS:
        return Partial("sum", pair.part)
    return Joined(pair.part)


def of_row_numbers(pair: Pair, given: Sequence[Placement]) -> Placement:
    """Return what becomes of row numbers: they may only look up the rows that they count.

    That is `values[jnp.arange(rows), labels]`: a comparison with 0, a choice, columns side by side,
    and a gather.
    """
    at, rows = next((i, p) for i, p in enumerate(given) if isinstance(p, RowNumbers))
    eqn = pair.whole
    try:
        grown = pair.growth(0)
    except ValueError:
        return Joined(pair.part)
    if pair.name == "lt" and at == 0 and given[1] == Replicate(zero=True):
        return Replicate(zero=True)  # none is negative
    if pair.name == "gather" and at == 1:
        return _looked_up(pair, given[0], rows)
    if grown is None:
        return Joined(pair.part)
    if pair.name == "concatenate":
        last = eqn.outvars[0].aval.ndim - 1
        widths = [v.aval.shape[-1] for v in eqn.invars]
        if eqn.params["dimension"] == last != rows.axis and widths[at] == 1:
            return RowNumbers(grown, sum(widths[:at]))
    integer = jnp.issubdtype(pair.part.outvars[0].aval.dtype, jnp.integer)
    if pair.name in SAME_FOR_EXTREMA | {"convert_element_type"} and integer:
        return (
            RowNumbers(grown) if rows.column is None and pair.name != "rev" else Joined(pair.part)
        )
    return Joined(pair.part)


def _looked_up(pair: Pair, operand: Placement, rows: RowNumbers) -> Placement:
    """Return the placement of `operand[rows, ...]`."""
    numbers = pair.whole.params["dimension_numbers"]
    column = 0 if rows.column is None else rows.column
    along = numbers.start_index_map[column]
    result = pair.whole.outvars[0].aval.ndim
    batch = [d for d in range(result) if d not in numbers.offset_dims]
    alone = rows.column is not None or pair.whole.invars[1].aval.shape[-1] == 1
    if alone and operand == Shard(along) and along in numbers.collapsed_slice_dims:
        return Shard(batch[rows.axis])
    return Joined(pair.part)


def row_factors(eqn: Equation) -> Sequence[Factor]:
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


def _of_partial(pair: Pair, given: Sequence[Placement]) -> Placed:
    """Return what becomes of partial results: they stay so under linear functions."""
    partial = [(i, p) for i, p in enumerate(given) if isinstance(p, Partial)]
    first = partial[0][1]
    lost = Placed([Joined(pair.part)] * len(pair.part.outvars), [pair.part])
    own = any(isinstance(p, Shard | PerSlice) for p in given)
    if own and not _adds_own(pair, given):
        return lost
    if not first.linear:
        same = {p.op for _, p in partial} == {first.op}
        known = SAME_FOR_EXTREMA | ({first.op} if len(given) > 1 else set())
        return (
            Placed([first] * len(pair.part.outvars), [pair.part])
            if (same and pair.name in known)
            else lost
        )
    if any(not jnp.issubdtype(v.aval.dtype, jnp.number) for v in pair.part.outvars):
        return lost
    if pair.name in CASES:
        return _aligned(pair, given) or lost
    if pair.name == "dot_general" and len(partial) == 1:
        return Placed([replace(first, scaled=True)], [pair.part])
    if pair.name in LINEAR_IN_FIRST and [i for i, _ in partial] == [0]:
        floats = [
            jnp.issubdtype(v.aval.dtype, jnp.inexact)
            for v in (pair.part.invars[0], pair.part.outvars[0])
        ]
        rounds = floats[0] and not floats[1]
        pads = pair.name == "pad" and given[1] != Replicate(zero=True)
        return lost if rounds or pads else Placed([first] * len(pair.part.outvars), [pair.part])
    return lost


def _adds_own(pair: Pair, given: Sequence[Placement]) -> bool:
    """Return whether a partial result and a slice's own value are added: a mean of the latter."""
    return pair.name in ("add", "sub") and not any(isinstance(p, Shard) for p in given)


def _scaled(pair: Pair, given: Sequence[Placement]) -> Placed | None:
    """Return a partial result times, or over, a value that all slices share."""
    whole, part = pair.whole, pair.part
    at = 0 if isinstance(given[0], Partial) else 1
    partial, other = given[at], given[1 - at]
    inexact = jnp.issubdtype(part.outvars[0].aval.dtype, jnp.inexact)
    if not isinstance(other, Replicate) or (pair.name == "div" and (at or not inexact)):
        return None
    assert isinstance(partial, Partial)
    kept = replace(partial, scaled=True)
    if not pair.differs(1 - at):
        return Placed([kept], [part])
    a, b = whole.invars[1 - at], part.invars[1 - at]
    assert isinstance(a, Literal)
    assert isinstance(b, Literal)
    large, small = (a.val, b.val) if pair.name == "div" else (b.val, a.val)
    if partial.op == "sum" and np.isclose(float(large), pair.num_slices * float(small), rtol=1e-6):
        return Placed([replace(kept, op="mean")], [part])  # divided by the number of its examples
    return Placed([kept], [pair.with_whole_numbers().part], changed=True)


def _aligned(pair: Pair, given: Sequence[Placement]) -> Placed | None:
    """Return a sum, or one of several cases, with its operands made the same kind of partial.

    Beside a mean, a sum counts as often as there are slices; beside a sum, what all slices share
    counts once if each adds its share of it.
    """
    cases = range(1 if pair.name == "select_n" else 0, len(given))
    if pair.name == "select_n" and not isinstance(given[0], Replicate):
        return None
    mean = any(given[i] == Partial("mean", pair.part) or given[i] == PerSlice() for i in cases)
    invars: list[Atom] = list(pair.part.invars)
    extra: list[Equation] = []
    for i in cases:
        own = given[i]
        if isinstance(own, Partial) and not own.linear:
            return None
        is_sum = isinstance(own, Partial) and own.op == "sum"
        if own == Replicate(zero=True) or is_sum != mean:
            continue
        if not jnp.issubdtype(invars[i].aval.dtype, jnp.inexact):
            return None
        factor = float(pair.num_slices) if mean else 1.0 / pair.num_slices
        eqn = _times(pair.part, invars[i], factor)
        extra.append(eqn)
        invars[i] = eqn.outvars[0]
    sums = [p for p in given if isinstance(p, Partial)]
    kind = Partial("mean" if mean else "sum", sums[0].equation, any(p.scaled for p in sums))
    return Placed([kind], [*extra, pair.part.replace(invars=invars)], changed=bool(extra))


def _times(eqn: Equation, atom: Atom, factor: float) -> Equation:
    """Return the equation that scales an operand of `eqn`."""
    value = jnp.zeros(atom.aval.shape, atom.aval.dtype)
    closed = make_jaxpr(lambda x: x * np.asarray(factor, x.dtype), value)
    made = closed.jaxpr.eqns[0]
    renamed = [atom if is_var(v) else v for v in made.invars]
    out = Var(made.outvars[0].aval)
    return made.replace(invars=renamed, outvars=[out], source_info=eqn.source_info)
