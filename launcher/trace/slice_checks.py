"""What a step may not do if its batch is to be cut into slices: every refusal, with its remedy.

`Whole` is the loss as traced on the whole batch; `part` the loss equation as traced on one slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from launcher.trace.batch_axis import NoBatchAxis, follow_batch_axis
from launcher.trace.errors import BatchError
from launcher.trace.jaxpr import Equation, Jaxpr, Literal, Var, dependents, is_var, source_line
from launcher.trace.primitive_kinds import LINEAR, SCALING
from launcher.trace.random_keys import is_typed


@dataclass(frozen=True, eq=False)
class Whole:
    """The loss on the whole batch: its equation, those before it, and where its inputs are from.

    `batch` are the variables of the batch, `constants` the captured arrays by their variable.
    """

    loss_equation: Equation
    before: Sequence[Equation]
    batch: Sequence[Var]
    batch_size: int
    constants: Mapping[Var, Any]


def check_same_program(whole: Equation, part: Equation) -> None:
    """Refuse a loss with other inputs or results on a slice than on the whole batch."""
    for what in ("invars", "outvars"):
        counts = len(getattr(whole, what)), len(getattr(part, what))
        if counts[0] != counts[1]:
            word = "inputs" if what == "invars" else "results"
            raise BatchError(
                f"the loss at {source_line(whole)} has {counts[0]} {word} on the whole batch and "
                f"{counts[1]} on a slice; what it computes may not depend on the batch size"
            )


def check_outputs(whole: Equation, part: Equation, num_slices: int) -> None:
    """Refuse results that cannot be combined as `reduce` says."""
    shapes = zip(whole.outvars, part.outvars, part.params["reduce"], strict=False)
    for i, (a, b, word) in enumerate(shapes):
        kind = {"mean": np.inexact, "sum": np.number}.get(word, np.generic)
        if word in ("mean", "sum") and not jax.numpy.issubdtype(b.aval.dtype, kind):
            other = '"sum" or "last"' if jax.numpy.issubdtype(b.aval.dtype, np.number) else '"last"'
            raise BatchError(
                f"result {i} of the loss is {b.aval.dtype}, whose {word} over microbatches is not "
                f"defined; say reduce={other} for it"
            )
        grown = (b.aval.shape[0] * num_slices, *b.aval.shape[1:]) if b.aval.shape else None
        if a.aval.shape != (grown if word == "concat" else b.aval.shape):
            remedy = (
                'say "mean", "sum" or "last" for a result that does not grow with the batch'
                if word == "concat"
                else 'say "concat" for a result with a row per example'
            )
            raise BatchError(
                f"result {i} of the loss has shape {a.aval.shape} on the whole batch and "
                f"{b.aval.shape} on one of {num_slices} slices, which reduce={word!r} cannot "
                f"combine; {remedy}"
            )


def check_sums(whole: Equation, part: Equation) -> None:
    """Refuse a sum over microbatches of what has been divided by the size of the (micro)batch."""
    programs = [eqn.params["jaxpr"].jaxpr for eqn in (whole, part)]
    for i, word in enumerate(part.params["reduce"]):
        scaled = _scaled_by_batch(programs[0], programs[1], i) if word == "sum" else None
        if scaled is not None:
            raise BatchError(
                f'result {i} of the loss is combined by reduce="sum", but {source_line(scaled)} '
                "scales it by the batch size, which in a microbatch is smaller; say "
                'reduce="mean", or take the sum over the rows and scale it after the gradients'
            )


def _scaled_by_batch(whole: Jaxpr, part: Jaxpr, result: int) -> Equation | None:
    """The equation that multiplies a result by a number which the batch size decides."""
    if len(whole.eqns) != len(part.eqns):
        return None
    made = {v: i for i, eqn in enumerate(whole.eqns) for v in eqn.outvars}
    waiting, seen = [whole.outvars[result]], set()
    while waiting:
        atom = waiting.pop()
        if not is_var(atom) or atom not in made or atom in seen:
            continue
        seen.add(atom)
        eqn, other = whole.eqns[made[atom]], part.eqns[made[atom]]
        if eqn.primitive.name not in LINEAR:
            continue
        divides = eqn.primitive.name == "div"
        pairs = zip(eqn.invars, other.invars, strict=True)
        literals = [
            (a.val, b.val) for a, b in pairs if isinstance(a, Literal) and isinstance(b, Literal)
        ]
        if eqn.primitive.name in SCALING:
            small, large = (1, 0) if divides else (0, 1)
            if any(abs(pair[small]) < abs(pair[large]) for pair in literals):
                return eqn
            if not divides and not literals:
                continue  # a product of two values: no longer linear
        waiting += eqn.invars[:1] if divides else eqn.invars
    return None


def check_constants(whole: Whole, part: Equation, constants: Mapping[Var, Any]) -> None:
    """Refuse inputs that are constants of the program, or become other ones on a slice.

    Args:
        whole: the step, traced on the whole batch.
        part: the loss's equation, traced on a slice.
        constants: those of the trace on a slice.
    """
    for a, b in zip(whole.loss_equation.invars, part.invars, strict=True):
        if not is_var(a) or a not in whole.constants:
            continue
        value = whole.constants[a]
        other = constants.get(b) if is_var(b) else np.asarray(b.val)
        if other is None or other is value or is_typed(a.aval):
            continue
        if a.aval.shape == b.aval.shape and not np.array_equal(value, other, equal_nan=False):
            raise BatchError(
                f"the loss at {source_line(part)} is given an array of shape {a.aval.shape} whose "
                "values depend on the batch size; compute it inside the loss, from the shapes of "
                "the loss's own arguments"
            )


def check_cuts(whole: Whole, axes: Sequence[int | None]) -> None:
    """Refuse to cut what does not hold one example after another."""
    eqn = whole.loss_equation
    leaves = dict.fromkeys((v for v in whole.batch if v.aval.shape), 0)
    batch_axes = follow_batch_axis(whole.before, leaves)
    counted = [e for e in whole.before if e.primitive.name == "iota"]
    counted_vars = dependents(whole.before, [v for e in counted for v in e.outvars])
    makers = {v: e for e in whole.before for v in e.outvars}
    for i, (v, axis) in enumerate(zip(eqn.invars, axes, strict=True)):
        if axis is None or not is_var(v):
            continue
        if i in eqn.params["wrt"]:
            raise BatchError(
                "the loss is differentiated with respect to the batch, of which a microbatch sees "
                "only a part; take that gradient without microbatches and replicas"
            )
        where = f"an input of the loss of shape {v.aval.shape}"
        if v in makers:
            where += f", made at {source_line(makers[v])},"
        found = batch_axes.get(v)
        if isinstance(found, NoBatchAxis):
            raise BatchError(
                f"{where} is cut into microbatches, but {found.equation.primitive.name} at "
                f"{source_line(found.equation)} cannot be shown to keep the rows of the batch in "
                "order; do that inside the loss, or where the batch is made"
            )
        if found is not None and found != axis:
            raise BatchError(
                f"{where} grows with the batch along axis {axis}, but its examples follow one "
                f"another along axis {found}; keep the examples in one axis of their own"
            )
        if found is None:
            _check_batchless(where, v, axis, whole, v in counted_vars)


def _check_batchless(where: str, v: Var, axis: int, whole: Whole, counted: bool) -> None:
    """An input as long as the batch that is not computed from it (noise, weights) is cut too."""
    if v.aval.shape[axis] != whole.batch_size:
        raise BatchError(
            f"{where} grows with the batch of {whole.batch_size} without having one row an example "
            "along that axis; make it inside the loss"
        )
    whole_numbers = jax.numpy.issubdtype(v.aval.dtype, jax.numpy.integer)
    if whole_numbers and (counted or v in whole.constants):
        raise BatchError(
            f"{where} holds whole numbers counted over the batch, such as row numbers, which mean "
            "something else in a microbatch; make it inside the loss"
        )
