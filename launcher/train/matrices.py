"""Parameters of several axes as the matrices that they stand for."""

from __future__ import annotations

import math
from typing import NamedTuple

STACKED = "layers"  # what families name the module whose parameters a scan stacks
_EXPERTS = "experts_"  # how the names of arrays begin that hold a matrix for each expert


class Axes(NamedTuple):
    """The axes of an array, in order: those of a stack, and a matrix's rows and columns.

    Attributes:
        stack: the number of axes along which matrices lie beside one another.
        rows: the number of axes that are the rows.
    """

    stack: int
    rows: int

    def sizes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
        """Return the sizes of the stack's axes, and the numbers of rows and columns."""
        middle = self.stack + self.rows
        inside = shape[self.stack : middle], shape[middle:]
        return shape[: self.stack], math.prod(inside[0]), math.prod(inside[1])


def matrix_axes(name: str, shape: tuple[int, ...]) -> Axes | None:
    """Return how a parameter is a matrix; None: it is none.

    Of more than two axes, such as those of attention's heads, the first ones are the inputs and the
    last ones the outputs; the cut is where the matrix is nearest to a square, which is right for
    products that read or make a whole hidden state.
    """
    words = name.split(".")
    stack = (STACKED in words) + words[-1].startswith(_EXPERTS)
    inner = shape[stack:]
    if len(inner) < 2:
        return None

    def slenderness(cut: int) -> float:
        return abs(math.log(math.prod(inner[:cut]) / math.prod(inner[cut:])))

    return Axes(stack, min(range(1, len(inner)), key=slenderness))
