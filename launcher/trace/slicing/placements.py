"""Placements: how a value of one slice of the batch relates to the value on the whole batch.

The words are DTensor's (`torch.distributed.tensor`), with slices of the batch in the place of
devices: a value is replicated, a shard along an axis, or a partial result that remains to be
combined. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from launcher.trace.ir.jaxpr import Equation, source_line


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


Placement: TypeAlias = Replicated | Sharded | RowNumbers | Partial | PerSlice | Joined


def joined_among(given: Iterable[Placement]) -> Joined | None:
    """Return the first placement that a slice cannot compute, if there is one.

    One of an equation that has operands tells more than one of a counter.
    """
    lost = [p for p in given if isinstance(p, Joined)]
    return next((p for p in lost if p.equation.invars), lost[0] if lost else None)


def common(placements: Iterable[Placement], eqn: Equation) -> Placement:
    """Return the placement of a value that is one of several: of a branch's, of a loop's carry.

    Zeros are a partial result of any kind, and a replicated value is its own mean.
    """
    given = list(placements)
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
