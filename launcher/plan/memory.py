"""How much memory a mesh needs on each of its devices: an estimate from shapes alone. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from jax.extend import core as jex

from launcher.plan.outer import OuterProgram, accumulator_dtype
from launcher.plan.remat import POLICIES, Policy, is_checkpoint, keeps
from launcher.plan.schedule import Kind, Task
from launcher.plan.sharding.dims import parts
from launcher.plan.sharding.layout import Layout
from launcher.plan.stages import StageGraph
from launcher.trace.graph import Equation, Var, dependents, nbytes, sub_jaxprs
from launcher.trace.step import Loss

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


def mesh_memory(
    graphs: Mapping[StageGraph, str],
    loss: Loss,
    outer: OuterProgram,
    tasks: Sequence[Task],
    layout: Layout,
) -> int:
    """Peak bytes on one device of a mesh: the state that lives there, the accumulators, the
    activations of the microbatches in flight, and the working set of one pass.

    Args:
        graphs: the mesh's stages, each with the name of its rematerialisation.
        tasks: the mesh's, in order. layout: of the mesh.
    """
    sizes = layout.sizes
    (mesh,) = {graph.mesh for graph in graphs}
    state = sum(
        nbytes(v.aval) // parts(layout.outer(v), sizes)
        for v, home in outer.homes.items()
        if home == mesh
    )
    operands = {outer.operands[i] for graph in graphs for i in graph.operands}
    received = sum(
        nbytes(operand.value.aval) // parts(layout.outer(operand.value), sizes)
        for operand in operands
        if not operand.stacked and outer.homes.get(operand.value, mesh) != mesh
    )
    gathered = max(_gathered_bytes(graph, loss, layout) for graph in graphs)
    if not loss.wrt:
        working = max(
            _boundary(graph, layout) + residual_bytes(graph, loss, layout) for graph in graphs
        )
        return state + received + gathered + working
    grads = sum(_gradient_bytes(i, loss, layout) for graph in graphs for i in graph.wrt)
    working = gathered + max(residual_bytes(graph, loss, layout) for graph in graphs)
    kept = activation_bytes(graphs, loss, tasks, layout)
    return state + received + grads + kept + working


def _gradient_bytes(i: int, loss: Loss, layout: Layout) -> int:
    """Of one gradient as it is accumulated."""
    aval = loss.invars[i].aval
    spec = layout.gradient(i) if layout.is_gathered(i) else layout.operand(i)
    size = int(aval.size) * accumulator_dtype(aval.dtype).itemsize
    return size // parts(spec, layout.sizes)


def _gathered_bytes(graph: StageGraph, loss: Loss, layout: Layout) -> int:
    """Of the parameters that a pass gathers, and their gradients before they are scattered."""
    found = [i for i in graph.operands if layout.is_gathered(i)]
    whole = sum(
        nbytes(loss.invars[i].aval) // parts(layout.operand(i), layout.sizes) for i in found
    )
    return 2 * whole if loss.wrt else whole


def activation_bytes(
    graphs: Mapping[StageGraph, str], loss: Loss, tasks: Sequence[Task], layout: Layout
) -> int:
    """The most bytes on one device that forward passes have left for backward passes to come.

    What a stage computes again it holds from the input part of its backward pass to the weight
    part, where these are two.
    """
    boundary = {g.index: _boundary(g, layout) for g in graphs}
    kept = {
        g.index: boundary[g.index] + residual_bytes(g, loss, layout, remat)
        for g, remat in graphs.items()
    }
    whole = {g.index: boundary[g.index] + residual_bytes(g, loss, layout) for g in graphs}
    level = peak = 0
    for stage, _, kind in tasks:
        if kind is Kind.FORWARD:
            level += kept[stage]
        elif kind is Kind.BACKWARD:
            level -= kept[stage]
        elif kind is Kind.BACKWARD_INPUT:
            level += whole[stage] - kept[stage]
        else:
            level -= whole[stage]
        peak = max(peak, level)
    return peak


def residual_bytes(graph: StageGraph, loss: Loss, layout: Layout, remat: str = "none") -> int:
    """About what one slice's forward pass leaves for its backward pass: the results of every
    non-linear equation through which gradients flow, as far as the policy keeps them."""
    return int(residual_bytes_of(graph, loss, lambda v: _local(v, layout), remat))


def residual_bytes_of(
    graph: StageGraph, loss: Loss, size: Callable[[Var], float], remat: str = "none"
) -> float:
    """The same by any measure of a value's bytes on one device."""
    sources = [*(loss.invars[i] for i in graph.wrt), *graph.active_in]
    return _saved(graph.equations, sources, POLICIES[remat], size)


def _local(var: Var, layout: Layout) -> int:
    return nbytes(var.aval) // parts(layout.activation(var), layout.sizes)


def _boundary(graph: StageGraph, layout: Layout) -> int:
    return sum(_local(v, layout) for v in graph.activations_in)


def _saved(
    equations: Iterable[Equation],
    sources: Iterable[Var],
    keep: Policy | None,
    size: Callable[[Var], float],
) -> float:
    active = dependents(equations, sources)
    total = 0.0
    for eqn in equations:
        if not any(v in active for v in eqn.outvars):
            continue
        inner = keep
        if keep is None and is_checkpoint(eqn):
            inner = eqn.params["policy"] or POLICIES["full"]
        bodies = [
            _saved(jaxpr.eqns, jaxpr.invars, inner, lambda v: nbytes(v.aval))
            + (_carry(eqn, jaxpr) if _is_kept(eqn, keep) else 0)
            for jaxpr in sub_jaxprs(eqn)
        ]
        if bodies:
            total += max(bodies) * eqn.params.get("length", 1)
        if (not bodies or is_checkpoint(eqn)) and _is_kept(eqn, keep):
            total += sum(size(v) for v in eqn.outvars)
    return total


def _carry(eqn: Equation, body: jex.Jaxpr) -> int:
    """What one turn of a loop receives from the turn before it."""
    if eqn.primitive.name != "scan":
        return 0
    first = eqn.params["num_consts"]
    return sum(nbytes(v.aval) for v in body.invars[first : first + eqn.params["num_carry"]])


def _is_kept(eqn: Equation, keep: Policy | None) -> bool:
    return eqn.primitive.name not in _LINEAR and (keep is None or keeps(keep, eqn))
