"""The losses of a train step: where its program holds them, and a placeholder for none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from launcher.trace.errors import GradientError, TraceError
from launcher.trace.ir.jaxpr import Equation, Var, is_var, make_jaxpr, source_line, sub_jaxprs
from launcher.trace.primitives import loss_p
from launcher.trace.slicing.slices import Loss


def find_losses(
    fun: Callable[..., Any], equations: Sequence[Equation], needs_loss: bool = True
) -> list[int]:
    """Return the places of the losses among the equations of a step.

    Raises:
        GradientError: there is none and there has to be one, or one is inside a loop or a branch.
    """
    name = getattr(fun, "__name__", repr(fun))
    for eqn in equations:
        if eqn.primitive is not loss_p and (inner := _loss_inside(eqn)):
            raise GradientError(
                f"{name} calls launcher.grad, value_and_grad or microbatched at "
                f"{source_line(inner)} inside {eqn.primitive.name} at {source_line(eqn)}; a "
                "parallelized step calls it outside of loops, branches and checkpoints. To "
                "accumulate gradients say num_micro_batches instead of looping; to skip an update "
                "take the gradients first and choose afterwards"
            )
    places = [i for i, eqn in enumerate(equations) if eqn.primitive is loss_p]
    if not places and needs_loss:
        raise GradientError(
            f"{name} takes no gradient through launcher.grad or launcher.value_and_grad. Use one "
            "of them instead of jax.grad (or launcher.microbatched in an evaluation step), and do "
            "not differentiate or vmap it. A function that only uses gradients follows the step "
            "that takes them: launcher.parallelize(apply, method=step)"
        )
    return places


def _loss_inside(eqn: Equation) -> Equation | None:
    """A loss among the equations of a loop's body, a branch or another function of an equation."""
    for jaxpr in sub_jaxprs(eqn):
        for inner in jaxpr.eqns:
            found = inner if inner.primitive is loss_p else _loss_inside(inner)
            if found is not None:
                return found
    return None


def with_named_operands(eqn: Equation, constants: dict[Var, Any]) -> Equation:
    """Return the loss equation with a constant of its own for every operand that is a literal."""
    operands = []
    for atom in eqn.invars:
        if not is_var(atom):
            constants[name := Var(atom.aval)] = np.asarray(atom.val, atom.aval.dtype)
            atom = name
        operands.append(atom)
    return eqn.replace(invars=operands)


def refuse_side_effects(equations: Sequence[Equation]) -> None:
    """Raise TraceError if an equation outside of the losses has a side effect."""
    for eqn in equations:
        if eqn.effects:
            raise TraceError(
                f"{eqn.primitive.name} at {source_line(eqn)} has a side effect; the parts of a "
                "parallelized step run in several places, which must not see each other. Remove "
                "the print or callback, or return the value as a result of the step"
            )


def no_loss_equation() -> Equation:
    """Return a loss that reads nothing, differentiates nothing and returns nothing."""
    nothing = make_jaxpr(lambda: ())
    (eqn,) = make_jaxpr(lambda: loss_p.bind(jaxpr=nothing, wrt=(), reduce=())).eqns
    return eqn


def no_loss(num_slices: int) -> Loss:
    """Return that loss on one of `num_slices` slices: it has no layers."""
    return Loss(num_slices, (), (), (), (), 0, (), (), (), (), ())
