"""The loss on one slice of the batch.

The step is traced again on a slice; comparing that trace with the one on the whole batch says which
inputs of the loss are cut and where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from launcher.trace.errors import BatchError
from launcher.trace.jaxpr import Atom, Aval, Equation, Var, make_jaxpr
from launcher.trace.layers import ANY_LAYER, cut_layers
from launcher.trace.random_keys import is_typed, raw_generator
from launcher.trace.slice_checks import (
    Whole,
    check_constants,
    check_cuts,
    check_outputs,
    check_same_program,
    check_sums,
)


@dataclass(frozen=True, eq=False)
class Loss:
    """The forward pass on one of `num_slices` equal slices of the batch.

    Attributes:
        invars: one variable an operand of the loss equation, in its order.
        outvars: the loss first (where something is differentiated), then the other results.
        equations, layers: the program and the layer of each equation (`ANY_LAYER`: of none).
        slice_axes: an operand's axis that is cut into slices, or None: every slice gets it whole.
        keys: whether an operand is a random key, or an array of them: each slice gets it folded
            with the slice's number (`random_keys.fold_slices`), as one row of a sliced operand.
            raw_keys: the generator of those that are raw (`jax.random.PRNGKey`).
        wrt: the operands that are differentiated. reduce: how each result is combined.
    """

    num_slices: int
    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    equations: tuple[Equation, ...]
    layers: tuple[int, ...]
    num_layers: int
    slice_axes: tuple[int | None, ...]
    keys: tuple[bool, ...]
    raw_keys: tuple[str | None, ...]
    wrt: tuple[int, ...]
    reduce: tuple[str, ...]


Retrace = Callable[[int], tuple[Equation, Mapping[Var, Any]]]  # the loss and the captured arrays


def slice_loss(whole: Whole, num_slices: int, retrace: Retrace) -> Loss:
    """The loss on one of `num_slices` equal slices of the batch.

    Raises:
        BatchError: the batch does not divide, or the step mixes its rows or takes its size for
            granted in a way that slices cannot honour.
    """
    _check_divides(whole.batch_size, num_slices)
    eqn = whole.loss_equation
    axes: list[int | None] = [None] * len(eqn.invars)
    if num_slices > 1:
        eqn, constants = retrace(num_slices)
        check_same_program(whole.loss_equation, eqn)
        check_outputs(whole.loss_equation, eqn, num_slices)
        check_sums(whole.loss_equation, eqn)
        check_constants(whole, eqn, constants)
        pairs = zip(whole.loss_equation.invars, eqn.invars, strict=True)
        axes = [_slice_axis(a.aval, b.aval, num_slices) for a, b in pairs]
        check_cuts(whole, axes)
    closed = eqn.params["jaxpr"]
    equations, layers, num_layers = cut_layers(closed.jaxpr)
    invars = list(closed.jaxpr.invars)
    raw: list[str | None] = [None] * len(invars)
    keys = [False] * len(invars)
    for i, v in enumerate(invars):
        if num_slices > 1 and axes[i] is None:
            raw[i] = raw_generator(v, equations)
            keys[i] = is_typed(v.aval) or raw[i] is not None
        if keys[i]:  # whoever needs it takes the key out of its row
            invars[i], out_of_row = _row_of(v)
            equations, layers, axes[i] = [out_of_row, *equations], [ANY_LAYER, *layers], 0
    return Loss(
        num_slices=num_slices,
        invars=tuple(invars),
        outvars=tuple(closed.jaxpr.outvars),
        equations=tuple(equations),
        layers=tuple(layers),
        num_layers=num_layers,
        slice_axes=tuple(axes),
        keys=tuple(keys),
        raw_keys=tuple(raw),
        wrt=eqn.params["wrt"],
        reduce=eqn.params["reduce"],
    )


def _row_of(v: Var) -> tuple[Var, Equation]:
    """A variable that holds one row, a value like `v`, and the equation that makes `v` of it."""
    row = jax.ShapeDtypeStruct((1, *v.aval.shape), v.aval.dtype)
    closed = make_jaxpr(lambda x: jax.lax.squeeze(x, [0]), row)
    return closed.jaxpr.invars[0], closed.jaxpr.eqns[0].replace(outvars=[v])


def _check_divides(batch_size: int, num_slices: int) -> None:
    if num_slices < 1:
        raise BatchError(
            f"the batch is to be cut into {num_slices} slices (microbatches × data-parallel "
            "replicas); the number of microbatches must be at least 1"
        )
    if batch_size % num_slices:
        raise BatchError(
            f"a batch of {batch_size} does not divide into {num_slices} equal slices "
            "(microbatches × data-parallel replicas); change the batch size or either number"
        )


def _slice_axis(whole: Aval, part: Aval, num_slices: int) -> int | None:
    axes = [i for i, (a, b) in enumerate(zip(whole.shape, part.shape, strict=False)) if a != b]
    if whole.ndim == part.ndim and not axes:
        return None
    if (
        whole.ndim != part.ndim
        or len(axes) > 1
        or whole.shape[axes[0]] != num_slices * part.shape[axes[0]]
    ):
        raise BatchError(
            f"an input of the loss has shape {whole.shape} on the whole batch and {part.shape} on "
            f"one of {num_slices} slices; it must grow along one axis in proportion to the batch"
        )
    return axes[0]


def shrink(leaves: Iterable[Any], is_batch: Iterable[bool], num_slices: int) -> list[Any]:
    """The shapes of a step's argument leaves when the batch is one slice of itself."""

    def part(leaf: Any) -> Any:
        shape = (leaf.shape[0] // num_slices, *leaf.shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type)

    pairs = zip(leaves, is_batch, strict=True)
    return [part(leaf) if cut and leaf.shape else leaf for leaf, cut in pairs]
