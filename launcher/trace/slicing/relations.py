"""Relations: how a value of one slice of the batch relates to the value on the whole batch.

The words are DTensor's (`torch.distributed.tensor`), with slices of the batch in the place of
devices: a value is replicated, a shard along an axis, or a partial result that remains to be
combined. They are found by comparing two traces, equation by equation (`Pair`).

An equation's factors (`factors`) say which dimensions run together; a number that differs between
the two traces is one that the batch size decides. Linear functions of partial results are partial
results; where a sum meets a value that all slices share, or a mean, the slice's program is changed
so that nothing counts more than once. Those with inner programs are in `follow_relations`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from launcher.trace.ir.factors import Factor, factors
from launcher.trace.ir.jaxpr import Atom, Equation, Literal, Var, is_var, source_line, splice
from launcher.trace.ir.primitive_kinds import (
    BARRIERS,
    CASES,
    DRAWS,
    EXTREMA,
    LINEAR_IN_FIRST,
    MATRIX_DIMS,
    PARTIAL_SUMS,
    RANDOM,
    SAME_FOR_EXTREMA,
    SCALING,
    UNSHARDED_ELEMENTWISE,
)

UNEVEN = -1  # see `grown_axis`


@dataclass(frozen=True)
class Replicated:
    """The value of every slice is that of the whole batch. `zero`: all of it is zero."""

    zero: bool = False


@dataclass(frozen=True)
class Sharded:
    """The value of slice `s` is block `s` of the whole batch's value along this axis.

    `unordered`: whether other rows would do as well: all are equal, or each slice draws its own.
    """

    axis: int
    unordered: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class InParts:
    """The value is several joined along this axis, and slice `s` has block `s` of each of them.

    `shares`: their lengths, in lowest terms.
    """

    axis: int
    shares: tuple[int, ...]


@dataclass(frozen=True)
class RowNumbers:
    """Whole numbers that count the rows of the slice along this axis, as indices into the slice.

    `column`: the only place along the last axis that does so; None: all of them.
    """

    axis: int
    column: int | None = None


@dataclass(frozen=True)
class Partial:
    """The whole batch's value is a reduction of the slices' values.

    Attributes:
        op: "sum", "mean", "max" or "min".
        equation: the one that reduced the examples.
        scaled: whether it was multiplied or divided by something since.
    """

    op: str
    equation: Equation = field(compare=False)
    scaled: bool = field(default=False, compare=False)

    @property
    def linear(self) -> bool:
        """Whether the reduction commutes with linear functions."""
        return self.op in ("sum", "mean")


@dataclass(frozen=True)
class PerSlice:
    """The slice's own value is meant (`launcher.per_slice`)."""


@dataclass(frozen=True, eq=False)
class Joined:
    """This equation needs examples of several slices: a slice cannot compute the value.

    `in_rule`: it is the derivative rule of the function that the equation calls.
    """

    equation: Equation
    in_rule: bool = False

    @property
    def in_words(self) -> str:
        """What joins examples, and where the user wrote it."""
        name, line = self.equation.primitive.name, source_line(self.equation)
        what = f"the derivative rule of {name}" if self.in_rule else name
        return f"{what} at {line}" if line else what


SliceRelation: TypeAlias = Replicated | Sharded | InParts | RowNumbers | Partial | PerSlice | Joined


def joined_among(given: Iterable[SliceRelation]) -> Joined | None:
    """Return the first relation that a slice cannot compute, if there is one.

    One of an equation that has operands tells more than one of a counter.
    """
    lost = [p for p in given if isinstance(p, Joined)]
    return next((p for p in lost if p.equation.invars), lost[0] if lost else None)


def common(relations: Iterable[SliceRelation], eqn: Equation) -> SliceRelation:
    """Return the relation of a value that is one of several: of a branch's, of a loop's carry.

    Zeros are a partial result of any kind, and a replicated value is its own mean.
    """
    given = sorted(relations, key=is_unordered)  # of equal ones a set keeps the first
    lost = joined_among(given)
    if lost is not None:
        return lost
    known = set(given)
    if len(known) > 1:
        known.discard(Replicated(zero=True))
    if len(known) == 2 and Replicated() in known:
        (other,) = known - {Replicated()}
        if other == Partial("mean", eqn) or isinstance(other, PerSlice):
            return other
    return known.pop() if len(known) == 1 else Joined(eqn)


def is_unordered(relation: SliceRelation) -> bool:
    """Return whether a value is sharded, and any other rows would do."""
    return isinstance(relation, Sharded) and relation.unordered


@dataclass(frozen=True, eq=False)
class Sliced:
    """An equation's results in a slice, and the equations that compute them.

    Attributes:
        relations: of its results.
        equations: the slice's program for them; one of them is the equation itself.
        changed: whether they are other than the slice's own.
    """

    relations: Sequence[SliceRelation]
    equations: Sequence[Equation]
    changed: bool = False


@dataclass(frozen=True, eq=False)
class Pair:
    """An equation on the whole batch, and the same one on one of `num_slices` slices.

    Attributes:
        in_rule: whether it stands in a derivative rule.
        number: the slice's number; None: no program is to be made, or it cannot read it.
    """

    whole: Equation
    part: Equation
    num_slices: int
    in_rule: bool = False
    number: Var | None = None

    @property
    def name(self) -> str:
        """The primitive's name."""
        return str(self.part.primitive.name)

    @property
    def results(self) -> range:
        """The indices of the results."""
        return range(len(self.part.outvars))

    def all(self, relation: SliceRelation) -> Sliced:
        """Return the equation as it is, with the same relation for each result."""
        return Sliced([relation] * len(self.results), [self.part])

    def joined(self) -> Sliced:
        """Return the equation as one that needs examples of several slices."""
        return self.all(Joined(self.part))

    def by_shape(self, result: int) -> Replicated | Sharded | Joined:
        """Return the relation of a result by its shapes: does it grow with the batch, and where."""
        whole, part = self.whole.outvars[result], self.part.outvars[result]
        axis = grown_axis(whole.aval.shape, part.aval.shape, self.num_slices)
        if axis == UNEVEN:
            return Joined(self.part)
        return Replicated() if axis is None else Sharded(axis)

    def own_value(self, result: int) -> SliceRelation:
        """Return the relation of a result that is meant of the slice alone."""
        shape = self.by_shape(result)  # it may grow unevenly, as a capacity that is rounded up does
        return shape if isinstance(shape, Sharded) else PerSlice()

    def differs(self, operand: int) -> bool:
        """Return whether an operand is a number that the batch size decides."""
        return differ(self.whole.invars[operand], self.part.invars[operand])

    def with_whole_numbers(self) -> Pair:
        """Return the pair with the whole batch's numbers where the slice's size decides them."""
        if not any(map(self.differs, range(len(self.part.invars)))):
            return self
        given = enumerate(zip(self.whole.invars, self.part.invars, strict=True))
        invars = [a if self.differs(i) else b for i, (a, b) in given]
        return replace(self, part=self.part.replace(invars=invars))


def differ(whole: Atom, part: Atom) -> bool:
    """Return whether two atoms are numbers that the batch size decides."""
    if is_var(whole) or is_var(part):
        return False
    both_nan = bool(whole.val != whole.val and part.val != part.val)
    return not both_nan and bool(whole.val != part.val)


def grown_axis(whole: Sequence[int], part: Sequence[int], num_slices: int) -> int | None:
    """Return the axis along which a shape grows with the batch; None if it does not.

    It is `UNEVEN` if it grows in another way than along one axis, in proportion to the batch.
    """
    if tuple(whole) == tuple(part):
        return None
    axes = [d for d, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b]
    if len(whole) != len(part) or len(axes) != 1 or whole[axes[0]] != num_slices * part[axes[0]]:
        return UNEVEN
    return axes[0]


def relate(pair: Pair, given: Sequence[SliceRelation]) -> Sliced:
    """Return the relations of the results of an equation without inner programs.

    Args:
        pair: the equation.
        given: the relation of each operand.
    """
    if pair.name == "select_n" and given[0] == Replicated(zero=True):
        predicate, case = pair.part.invars[:2]  # the others are never taken
        cases = [case] * (len(given) - 1)
        # The same value, so not changed.
        return Sliced([given[1]], [pair.part.replace(invars=[predicate, *cases])])
    lost = joined_among(given)
    if lost is not None:
        return pair.all(lost)
    if pair.name in BARRIERS:
        return Sliced(list(given), [pair.part])
    if any(isinstance(p, RowNumbers) for p in given):
        return pair.all(_of_row_numbers(pair, given)) if len(pair.results) == 1 else pair.joined()
    if any(isinstance(p, Partial) for p in given):
        results = zip(pair.whole.outvars, pair.part.outvars, strict=True)
        if any(a.aval.shape != b.aval.shape for a, b in results):
            return pair.joined()  # each row has the total
        if pair.name in SCALING:
            return _scaled(pair, given) or pair.joined()
    if pair.name not in DRAWS and not same_params(pair):  # a draw's shape is that for one key
        return pair.joined()
    numbered = pair.with_whole_numbers()
    sliced = _related(numbered, given)
    return replace(sliced, changed=sliced.changed or numbered is not pair)


def _related(pair: Pair, given: Sequence[SliceRelation]) -> Sliced:
    if any(isinstance(p, Partial) for p in given):
        return _of_partial(pair, given)
    if any(isinstance(p, Sharded) for p in given):
        relations = [_of_shards(pair, given, j) for j in pair.results]
    elif any(isinstance(p, PerSlice) for p in given):
        relations = [pair.own_value(j) for j in pair.results]
    else:
        relations = [_of_replicated(pair, given, j) for j in pair.results]
    return Sliced(mark_unordered(pair, given, relations), [pair.part])


def _of_replicated(pair: Pair, given: Sequence[SliceRelation], result: int) -> SliceRelation:
    shape = pair.by_shape(result)
    if isinstance(shape, Replicated):
        return Replicated(_is_zero(pair, given))
    if not isinstance(shape, Sharded):
        return Joined(pair.part)
    if pair.name == "iota" and shape.axis == pair.part.params["dimension"]:
        return RowNumbers(shape.axis)
    repeats = pair.name == "iota" or pair.name in RANDOM
    if pair.name == "broadcast_in_dim":
        dims = list(pair.whole.params["broadcast_dimensions"])
        before = pair.whole.invars[0].aval.shape
        repeats = shape.axis not in dims or before[dims.index(shape.axis)] == 1
    return shape if repeats else Joined(pair.part)


def _is_zero(pair: Pair, given: Sequence[SliceRelation]) -> bool:
    """Return whether a result is the form of a zero: of what a sum starts from."""
    zero = pair.name in LINEAR_IN_FIRST and given[0] == Replicated(zero=True)
    return zero and not _fills(pair, given)


def mark_unordered(
    pair: Pair, given: Sequence[SliceRelation], relations: Sequence[SliceRelation]
) -> Sequence[SliceRelation]:
    """Return the relations of results, unordered where nothing that they are made of has an order.

    A reshape makes several rows, other than one another, of a row.
    """
    operands = zip(pair.whole.invars, pair.part.invars, given, strict=True)
    ordered = any(a.aval.shape != b.aval.shape and not is_unordered(p) for a, b, p in operands)
    if ordered or pair.name == "reshape":
        return relations
    return [replace(p, unordered=True) if isinstance(p, Sharded) else p for p in relations]


def _fills(pair: Pair, given: Sequence[SliceRelation]) -> bool:
    """Return whether an equation adds numbers of its own: a look-up out of bounds, or a pad."""
    pads = pair.name == "pad" and given[1] != Replicated(zero=True)
    return pads or bool(pair.part.params.get("fill_value"))


def same_params(pair: Pair) -> bool:
    """Return whether an equation's own numbers differ only along axes that grow with the batch."""
    atoms = (*pair.whole.invars, *pair.whole.outvars), (*pair.part.invars, *pair.part.outvars)
    shapes = [(a.aval.shape, b.aval.shape) for a, b in zip(*atoms, strict=True)]
    grown = {d for a, b in shapes for d, (x, y) in enumerate(zip(a, b, strict=False)) if x != y}
    for name, a in pair.whole.params.items():
        b = pair.part.params.get(name)
        if isinstance(a, int) and a != b:
            return False
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            places = [d for d, (x, y) in enumerate(zip(a, b, strict=True)) if _unlike(x, y)]
            if not grown.issuperset(places):
                return False
    return True


def _unlike(a: object, b: object) -> bool:
    """Return whether two numbers, or tuples of numbers, differ; of anything else, False."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) != len(b) or any(map(_unlike, a, b))
    return isinstance(a, int) and isinstance(b, int) and a != b


def _of_shards(pair: Pair, given: Sequence[SliceRelation], result: int) -> SliceRelation:
    """Return the relation by the factor that holds every operand's sharded dimension."""
    if pair.name in RANDOM:
        return pair.own_value(result)
    places = {(i, p.axis) for i, p in enumerate(given) if isinstance(p, Sharded)}
    along = [f for f in row_factors(pair.whole) if places <= set(f.operands) and not f.indexed]
    if not along:
        reduces = _is_extremum(pair) and {d for _, d in places} <= set(pair.part.params["axes"])
        return _reduced(pair, given) if reduces else Joined(pair.part)
    axis = next((int(d) for j, d in along[0].results if j == result), None)
    relation = Replicated() if axis is None else Sharded(axis)
    if pair.by_shape(result) != relation:
        return Joined(pair.part)
    return _reduced(pair, given) if axis is None else relation


def _is_extremum(pair: Pair) -> bool:
    """Return whether the examples' largest or smallest is taken: of whole numbers, `or` is none."""
    boolean = pair.part.outvars[0].aval.dtype == bool
    return pair.name in EXTREMA and (boolean or pair.name in ("reduce_max", "reduce_min"))


def _reduced(pair: Pair, given: Sequence[SliceRelation]) -> SliceRelation:
    if _is_extremum(pair):
        return Partial(EXTREMA[pair.name], pair.part)
    adds = pair.name in ("scatter-add", "scatter_add") and given[0] == Replicated(zero=True)
    return Partial("sum", pair.part) if adds or pair.name in PARTIAL_SUMS else Joined(pair.part)


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


def _of_partial(pair: Pair, given: Sequence[SliceRelation]) -> Sliced:
    """Return the results of partial operands: they stay partial under linear functions."""
    partial = {i: p for i, p in enumerate(given) if isinstance(p, Partial)}
    first, *others = partial.values()
    sharded = any(isinstance(p, Sharded) for p in given)
    own = any(isinstance(p, PerSlice) for p in given)
    if sharded or (own and pair.name not in ("add", "sub")):  # which make a mean of the slice's own
        return pair.joined()
    if not first.linear:
        same = all(p.op == first.op for p in others)
        known = pair.name in SAME_FOR_EXTREMA or (pair.name == first.op and len(given) > 1)
        return pair.all(first) if same and known else pair.joined()
    if any(not jnp.issubdtype(v.aval.dtype, jnp.number) for v in pair.part.outvars):
        return pair.joined()
    if pair.name in CASES:
        return _aligned(pair, given) or pair.joined()
    if pair.name == "dot_general" and not others:
        return pair.all(replace(first, scaled=True))
    if pair.name in LINEAR_IN_FIRST and [*partial] == [0]:
        before, after = pair.part.invars[0].aval.dtype, pair.part.outvars[0].aval.dtype
        rounds = jnp.issubdtype(before, jnp.inexact) and not jnp.issubdtype(after, jnp.inexact)
        return pair.joined() if rounds or _fills(pair, given) else pair.all(first)
    return pair.joined()


def _scaled(pair: Pair, given: Sequence[SliceRelation]) -> Sliced | None:
    """Return a partial result multiplied or divided by a value that all slices share."""
    at = 0 if isinstance(given[0], Partial) else 1
    partial, other = given[at], given[1 - at]
    inexact = jnp.issubdtype(pair.part.outvars[0].aval.dtype, jnp.inexact)
    if not isinstance(other, Replicated) or (pair.name == "div" and (at or not inexact)):
        return None
    assert isinstance(partial, Partial)
    if not partial.linear:
        return None  # a negative factor makes the smallest of the largest
    kept = replace(partial, scaled=True)
    if not pair.differs(1 - at):
        return pair.all(kept)
    numbers = [literal_value(eqn.invars[1 - at]) for eqn in (pair.whole, pair.part)]
    large, small = numbers if pair.name == "div" else numbers[::-1]
    if partial.op == "sum" and np.isclose(large, pair.num_slices * small, rtol=1e-6, atol=0):
        return pair.all(replace(kept, op="mean"))  # divided by the number of its examples
    return Sliced([kept], [pair.with_whole_numbers().part], changed=True)


def literal_value(atom: Atom) -> float:
    """Return the number that a literal is."""
    assert isinstance(atom, Literal)
    return float(atom.val)


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
    (made,), _ = splice(lambda x: [x * np.asarray(factor, x.dtype)], [atom])
    return made.replace(source_info=eqn.source_info)


def _of_row_numbers(pair: Pair, given: Sequence[SliceRelation]) -> SliceRelation:
    """Return the relation of results of row numbers, which may only look up the rows they count.

    That is `values[jnp.arange(rows), labels]`: a comparison with 0, a choice, columns side by side,
    and a gather.
    """
    at, rows = next((i, p) for i, p in enumerate(given) if isinstance(p, RowNumbers))
    eqn, shape = pair.whole, pair.by_shape(0)
    joined = Joined(pair.part)
    if isinstance(shape, Joined):
        return joined
    if pair.name == "lt" and at == 0 and given[1] == Replicated(zero=True):
        return Replicated(zero=True)  # none is negative
    if pair.name == "gather" and at == 1:
        return _looked_up(pair, given[0], rows)
    if not isinstance(shape, Sharded):
        return joined
    if pair.name == "concatenate":
        last = eqn.outvars[0].aval.ndim - 1
        widths = [v.aval.shape[-1] for v in eqn.invars]
        if eqn.params["dimension"] == last != rows.axis and widths[at] == 1:
            return RowNumbers(shape.axis, sum(widths[:at]))
    if pair.name == "reshape" and _without_ones(eqn.invars[at]) != _without_ones(eqn.outvars[0]):
        return joined  # pairs of rows, or rows by turns
    keeps = pair.name in SAME_FOR_EXTREMA | {"convert_element_type"} and pair.name != "rev"
    integer = jnp.issubdtype(pair.part.outvars[0].aval.dtype, jnp.integer)
    return RowNumbers(shape.axis) if keeps and integer and rows.column is None else joined


def _without_ones(atom: Atom) -> list[int]:
    return [d for d in atom.aval.shape if d != 1]


def _looked_up(pair: Pair, operand: SliceRelation, rows: RowNumbers) -> SliceRelation:
    """Return the relation of `operand[rows, ...]`."""
    numbers = pair.whole.params["dimension_numbers"]
    values, indices = (v.aval.shape for v in pair.whole.invars)
    along = numbers.start_index_map[rows.column or 0]
    batch = [d for d in range(pair.whole.outvars[0].aval.ndim) if d not in numbers.offset_dims]
    alone = rows.column is not None or indices[-1] == 1
    all_rows = values[along] == indices[rows.axis]  # not those of the first half
    if all_rows and alone and operand == Sharded(along) and along in numbers.collapsed_slice_dims:
        return Sharded(batch[rows.axis])
    return Joined(pair.part)
