"""How much memory a stage needs on each of its devices: an estimate from shapes alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.plan.outer import OuterProgram, Slicing, accumulator_dtype
from launcher.plan.schedule import Task, max_in_flight
from launcher.plan.stages import StageGraph
from launcher.trace.graph import Equation, dependents, nbytes
from launcher.trace.step import Loss, TracedStep

# Equations whose backward pass needs nothing of their operands or results.
_LINEAR = {
    "add",
    "add_any",
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "expand_dims",
    "neg",
    "pad",
    "reduce_sum",
    "reshape",
    "rev",
    "slice",
    "squeeze",
    "stop_gradient",
    "sub",
    "transpose",
}


def stage_memory(
    graph: StageGraph,
    step: TracedStep,
    loss: Loss,
    outer: OuterProgram,
    slicing: Slicing,
    tasks: Sequence[Task],
    remat: str,
) -> int:
    """Peak bytes on one device: the state that lives there, the accumulators, the activations of
    the microbatches in flight, and the working set of one backward pass."""
    state = sum(nbytes(v.aval) for v, home in outer.homes.items() if home == graph.index)
    grads = sum(
        loss.invars[i].aval.size * accumulator_dtype(loss.invars[i].aval.dtype).itemsize
        for i in graph.wrt
    )
    received = sum(
        nbytes(outer.operands[i].value.aval)
        for i in graph.operands
        if not outer.operands[i].stacked
        and outer.homes.get(outer.operands[i].value, graph.index) != graph.index
    )
    boundary = sum(nbytes(v.aval) for v in graph.activations_in)
    saved = residual_bytes(graph, loss)
    if not loss.wrt:
        return state + received + boundary + saved
    kept = boundary if remat == "full" else boundary + saved
    return state + received + grads + kept * max_in_flight(tuple(tasks)) + saved


def residual_bytes(graph: StageGraph, loss: Loss) -> int:
    """About what one slice's forward pass leaves for its backward pass: the results of every
    non-linear equation through which gradients flow."""
    sources = [*(loss.invars[i] for i in graph.wrt), *graph.active_in]
    active = dependents(graph.equations, sources)

    def saved(eqn: Equation) -> bool:
        return eqn.primitive.name not in _LINEAR and any(v in active for v in eqn.outvars)

    return sum(nbytes(v.aval) for e in graph.equations if saved(e) for v in e.outvars)
