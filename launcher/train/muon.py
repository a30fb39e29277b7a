"""Muon: momentum that is made orthogonal, matrix by matrix.

(Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks"; the size of the
updates is that of Liu et al., 2025, "Muon is Scalable for LLM Training", so that learning rates and
weight decays are those of AdamW.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from launcher.checkpoint.names import map_named, matches

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

    With more than two axes, such as attention's heads, the leading axes are inputs and the trailing
    ones outputs, divided where the matrix is nearest to square; that is right for products that
    read or make a whole hidden state.
    """
    words = name.split(".")
    stack = (STACKED in words) + words[-1].startswith(_EXPERTS)
    inner = shape[stack:]
    if len(inner) < 2:
        return None

    def slenderness(cut: int) -> float:
        return abs(math.log(math.prod(inner[:cut]) / math.prod(inner[cut:])))

    return Axes(stack, min(range(1, len(inner)), key=slenderness))


_RMS = 0.2  # of an update, about that of Adam's


def scale_by_muon_or_adam(
    momentum: float, adam: Sequence[str], b1: float, b2: float, eps: float
) -> optax.GradientTransformation:
    """Return a transformation of gradients: Muon for matrices, Adam for the rest.

    Args:
        momentum: of Muon.
        adam: patterns of matrices that Adam is for, such as embeddings.
        b1: of Adam, as the next two.
        b2: of Adam.
        eps: of Adam.
    """
    by_adam = matches(*adam)

    def axes(params: Any) -> Any:
        return map_named(lambda name, leaf: _numbers(name, leaf.shape), params)

    def labels(params: Any) -> Any:
        def label(name: str, leaf: Any) -> str:
            is_matrix = matrix_axes(name, leaf.shape) is not None
            return "muon" if is_matrix and not by_adam(name) else "adam"

        return map_named(label, params)

    def scaled(updates: Any, params: Any) -> Any:
        del params
        return map_named(lambda name, leaf: leaf * _factor(name, leaf.shape), updates)

    muon = scale_by_muon(beta=momentum, weight_dimension_numbers=axes)
    return optax.partition(
        {
            "muon": optax.chain(muon, optax.stateless(scaled)),
            "adam": optax.scale_by_adam(b1, b2, eps),
        },
        labels,
    )


def _numbers(name: str, shape: tuple[int, ...]) -> MuonDimensionNumbers:
    axes = matrix_axes(name, shape)
    assert axes is not None, name
    middle = axes.stack + axes.rows
    rows, columns = tuple(range(axes.stack, middle)), tuple(range(middle, len(shape)))
    return MuonDimensionNumbers(reduction_axis=rows, output_axis=columns)


def _factor(name: str, shape: tuple[int, ...]) -> float:
    axes = matrix_axes(name, shape)
    assert axes is not None, name
    _, rows, columns = axes.sizes(shape)
    return float(_RMS * max(rows, columns) ** 0.5)
