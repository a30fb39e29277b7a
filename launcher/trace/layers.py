"""Cutting the forward pass into layers at the user's marks.

A *layer* is the run of equations between two `mark_pipeline_boundary()` calls. Equations that
depend on no operand at all (an iota, a mask made of literals) belong to no layer: whoever needs
one computes it, so that a constant never crosses a stage boundary.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.trace.errors import BoundaryError, TraceError
from launcher.trace.ir.jaxpr import Equation, Jaxpr, dependents, needed, source_line, sub_jaxprs
from launcher.trace.ir.primitive_kinds import CONSTRAINTS, KERNELS
from launcher.trace.primitives import boundary_p

ANY_LAYER = -1


def cut_layers(jaxpr: Jaxpr) -> tuple[list[Equation], list[int], int]:
    """Return the needed equations of a flattened forward pass, the layer of each, and their number.

    Returns:
        `(equations, layers, num_layers)`; `layers[i]` is `ANY_LAYER` for an equation that depends
        on no input. Layers that hold no equation are kept, so that marks and layers agree.

    Raises:
        BoundaryError: a mark stands inside a loop, a branch or a checkpointed function.
        TraceError: an equation has a side effect, or says how a value is sharded.
    """
    layer, layer_of = 0, {}
    for eqn in jaxpr.eqns:
        if eqn.primitive is boundary_p:
            layer += 1
            continue
        _refuse_uncuttable(eqn)
        layer_of[id(eqn)] = layer
    equations = needed([e for e in jaxpr.eqns if e.primitive is not boundary_p], jaxpr.outvars)
    from_inputs = dependents(equations, jaxpr.invars)
    layers = [
        layer_of[id(eqn)] if any(v in from_inputs for v in eqn.outvars) else ANY_LAYER
        for eqn in equations
    ]
    return equations, layers, layer + 1


def _refuse_uncuttable(eqn: Equation) -> None:
    culprit = _impure(eqn)
    if culprit is not None:
        raise TraceError(
            f"{culprit.primitive.name} at {source_line(culprit)} has a side effect; a loss "
            "that runs in pipeline stages must be pure. Remove the callback or print, or return "
            "the value as aux"
        )
    constraint = _constraint(eqn)
    if constraint is not None:
        name = constraint.primitive.name.replace("sharding", "with_sharding")
        raise TraceError(
            f"{name} at {source_line(constraint)}: the plan decides how a parallelized step is "
            "sharded, on meshes of its own. Remove it"
        )
    if _holds_boundary(list(sub_jaxprs(eqn))):
        raise BoundaryError(
            f"mark_pipeline_boundary() inside {eqn.primitive.name} at {source_line(eqn)}: a layer "
            "cannot end inside a loop, a branch or a checkpointed function. Mark outside of it"
        )


def _impure(eqn: Equation) -> Equation | None:
    """Return the equation, or the one in its body, that calls Python or has another effect."""
    if eqn.primitive.name.endswith("_callback"):
        return eqn
    if eqn.primitive.name in KERNELS:
        return None
    inner = (_impure(e) for jaxpr in sub_jaxprs(eqn) for e in jaxpr.eqns)
    return next((e for e in inner if e is not None), eqn if eqn.effects else None)


def _constraint(eqn: Equation) -> Equation | None:
    """Return the equation, or the one in its body, that says how a value is sharded."""
    if eqn.primitive.name in CONSTRAINTS:
        return eqn
    inner = (_constraint(e) for jaxpr in sub_jaxprs(eqn) for e in jaxpr.eqns)
    return next((e for e in inner if e is not None), None)


def _holds_boundary(jaxprs: Sequence[Jaxpr]) -> bool:
    return any(
        eqn.primitive is boundary_p or _holds_boundary(list(sub_jaxprs(eqn)))
        for jaxpr in jaxprs
        for eqn in jaxpr.eqns
    )
