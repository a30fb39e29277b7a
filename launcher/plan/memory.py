"""How much memory a mesh needs on each of its devices: an estimate from shapes alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.plan.footprint import Footprint, as_one, footprint, stage_passes
from launcher.plan.joint import Name, input_spec
from launcher.plan.outer import OuterProgram, accumulator_dtype
from launcher.plan.passes import runs_as_one
from launcher.plan.sharding.dims import parts
from launcher.plan.sharding.layout import DATA, ROWS, Layout
from launcher.plan.stages import StageGraph
from launcher.schedule import Kind, Task, backward_follows
from launcher.trace.graph import nbytes
from launcher.trace.step import Loss

Known = dict[object, Footprint]  # of stages that are the same program, cut alike


def mesh_memory(
    graphs: Mapping[StageGraph, str],
    loss: Loss,
    outer: OuterProgram,
    tasks: Sequence[Task],
    layout: Layout,
    known: Known,
) -> tuple[int, dict[int, Footprint]]:
    """Peak bytes on one device of a mesh: the state that lives there, the accumulators, the
    activations of the microbatches in flight, and the room that the tasks work in; and what each
    stage needs.

    Args:
        graphs: the mesh's stages, each with the name of its rematerialisation.
        tasks: the mesh's, in order. layout: of the mesh. known: footprints found so far.
    """
    gathered = max(_gathered_bytes(graph, loss, layout) for graph in graphs)
    grads = sum(_gradient_bytes(i, loss, layout) for graph in graphs for i in graph.wrt)
    held = _state_bytes(graphs, outer, layout) + gathered + (grads if loss.wrt else 0)
    found = {
        graph.index: _footprint(graph, loss, remat, tasks, layout, known)
        for graph, remat in graphs.items()
    }
    return held + int(activation_bytes(found, tasks)), found


def activation_bytes(footprints: Mapping[int, Footprint], tasks: Sequence[Task]) -> float:
    """The most bytes on one device that tasks, in this order, leave to later ones and work in.
    `footprints`: by stage."""
    level = peak = 0.0
    for stage, _, kind in tasks:
        if kind in footprints[stage].left:
            peak = max(peak, level + footprints[stage].working[kind])
            level += footprints[stage].left[kind]
    return peak


def _footprint(
    graph: StageGraph,
    loss: Loss,
    remat: str,
    tasks: Sequence[Task],
    layout: Layout,
    known: Known,
) -> Footprint:
    kinds = {task.kind for task in tasks if task.stage == graph.index}
    at_once = not graph.activations_out and backward_follows(tasks, graph.index)
    names = [Name("operand", i) for i in graph.operands]
    names += [Name("activation", v) for v in graph.activations_in]
    key = (
        graph.structure,
        tuple(input_spec(name, layout) for name in names),
        tuple(sorted(layout.sizes.items())),
        (remat, at_once, *sorted(kind.value for kind in kinds)),
        tuple(loss.slice_axes[i] is None for i in graph.operands),
    )
    if key not in known:
        # What is used at once need not be computed again.
        of = stage_passes(graph, loss, "none" if at_once else remat, kinds)
        seeds = {v: input_spec(name, layout) for name, v in of.joint.inputs.items()}
        inside = layout.inside(of.joint.equations, seeds)
        if at_once and runs_as_one(of.passes[Kind.FORWARD], inside):
            of = as_one(of, graph, kinds)
        known[key] = footprint(of, inside)
    return known[key]


def _state_bytes(graphs: Mapping[StageGraph, str], outer: OuterProgram, layout: Layout) -> int:
    """What a mesh holds all through the step: arguments that live there or are sent there, and the
    batch, of which each replica has its rows."""
    (mesh,) = {graph.mesh for graph in graphs}
    whole = [v for v, home in outer.homes.items() if home == mesh]
    batch = 0
    for operand in {outer.operands[i]: None for graph in graphs for i in graph.operands}:
        if operand.stacked:
            batch += nbytes(operand.value.aval) // (layout.sizes[DATA] * layout.sizes[ROWS])
        elif outer.homes.get(operand.value, mesh) != mesh:
            whole.append(operand.value)
    return batch + sum(nbytes(v.aval) // parts(layout.outer(v), layout.sizes) for v in whole)


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
