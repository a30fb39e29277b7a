"""Relations: how a value of one slice of the batch relates to the value on the whole batch.

The words are DTensor's (`torch.distributed.tensor`), with slices of the batch in the place of
devices: a value is replicated, a shard along an axis, or a partial result that remains to be
combined. They are found by comparing two traces, equation by equation (`Pair`). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from launcher.trace.ir.jaxpr import Atom, Equation, is_var, source_line


@dataclass(frozen=True)
class Replicated:
    """The value of every slice is that of the whole batch. `zero`: all of it is zero."""

    zero: bool = False


@dataclass(frozen=True)
class Sharded:
    """The value of slice `s` is block `s` of the whole batch's value along this axis."""

    axis: int


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


SliceRelation: TypeAlias = Replicated | Sharded | RowNumbers | Partial | PerSlice | Joined


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
    given = list(relations)
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


@dataclass(frozen=True, eq=False)
class Pair:
    """An equation on the whole batch, and the same one on one of `num_slices` slices.

    `in_rule`: whether it stands in a derivative rule.
    """

    whole: Equation
    part: Equation
    num_slices: int
    in_rule: bool = False

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
        return differ(self.whole.invars[operand], self.part.invars[operand])

    def with_whole_numbers(self) -> Pair:
        """Return the pair with the whole batch's numbers where the slice's size decides them."""
        if not any(map(self.differs, range(len(self.part.invars)))):
            return self
        given = enumerate(zip(self.whole.invars, self.part.invars, strict=True))
        invars = [a if self.differs(i) else b for i, (a, b) in given]
        return replace(self, part=self.part.replace(invars=invars))


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


def differ(whole: Atom, part: Atom) -> bool:
    """Return whether two atoms are numbers that the batch size decides."""
    if is_var(whole) or is_var(part):
        return False
    both_nan = bool(whole.val != whole.val and part.val != part.val)
    return not both_nan and bool(whole.val != part.val)


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
