"""Find parameters that no gradient reaches, to warn about them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.trace.interface import leaf_names
from launcher.trace.ir.jaxpr import Atom, Equation, Jaxpr, Var, has_tangent, is_var, sub_jaxprs
from launcher.trace.ir.primitive_kinds import RECOMPUTED, WITHOUT_GRADIENT
from launcher.trace.step import TracedStep

_MOST_NAMES = 4


def no_gradient_note(step: TracedStep) -> str | None:
    """Return a line that names the parameters that no gradient reaches; None if there are none.

    A parameter is an argument of the step that the loss is differentiated with respect to.
    """
    jaxpr: Jaxpr = step.loss_equation.params["jaxpr"]
    wrt = step.loss_equation.params["wrt"]
    reached = reached_by_gradients(jaxpr.eqns, jaxpr.outvars[:1]) if wrt else set()
    operands = {i: step.loss_equation.invars[i] for i in wrt}
    with_gradient = {operands[i] for i in wrt if jaxpr.invars[i] in reached}
    without = {v for v in operands.values() if v not in with_gradient}
    names = [n for v, n in zip(step.invars, leaf_names(step), strict=True) if v in without]
    if not names:
        return None
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    them = "it" if len(names) == 1 else "them"
    return (
        f"no gradient reaches {', '.join(names[:_MOST_NAMES])}{more}: the loss does not depend on "
        f"{them}, or only through stop_gradient or whole numbers"
    )


def reached_by_gradients(equations: Sequence[Equation], outs: Iterable[Atom]) -> set[Var]:
    """Return the values through which gradients flow back from `outs`."""
    reached = {v for v in outs if is_var(v)}
    for eqn in reversed(equations):
        found = [i for i, v in enumerate(eqn.outvars) if v in reached]
        if not found or eqn.primitive.name in WITHOUT_GRADIENT:
            continue
        operands = eqn.invars
        if eqn.primitive.name in RECOMPUTED:
            (body,) = sub_jaxprs(eqn)
            inside = reached_by_gradients(body.eqns, [body.outvars[i] for i in found])
            operands = [v for v, w in zip(operands, body.invars, strict=True) if w in inside]
        reached |= {v for v in operands if is_var(v) and has_tangent(v.aval)}
    return reached
