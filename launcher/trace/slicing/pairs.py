"""An equation twice: as traced on the whole batch, and as traced on one slice of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.trace.ir.jaxpr import Atom, Equation, is_var
from launcher.trace.slicing.placements import Placement


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
