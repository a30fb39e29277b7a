"""Peak memory of a submesh on each of its devices, estimated from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.partition.partitioned import PartitionedStep
from launcher.partition.sharding.layout import ROWS, Layout
from launcher.partition.sharding.named_dims import parts
from launcher.partition.slicing import accumulator_dtype
from launcher.partition.stages import StageGraph
from launcher.plan.cost.stage_memory import Footprint
from launcher.schedule import Task
from launcher.trace import Loss
from launcher.trace.jaxpr import nbytes


def mesh_memory(cut: PartitionedStep, mesh: int, footprints: Mapping[int, Footprint]) -> int:
    """Return the peak memory of one device of a submesh, in bytes.

    It holds the state that lives there, the accumulators (of gradients, and of results, such as a
    model's new state), the activations of the microbatches in flight, and the peak temporaries of
    the tasks.

    Args:
        cut: the partitioned step.
        mesh: index of the submesh.
        footprints: the footprint of each of its stages, by stage.
    """
    graphs, layout, loss = cut.on_mesh(mesh), cut.layouts[mesh], cut.loss
    gathered = max(_gathered_bytes(graph, loss, layout) for graph in graphs)
    used = [i for graph in graphs for i in graph.wrt if (i, graph.index) in cut.update.grad_parts]
    grads = sum(_gradient_bytes(i, loss, layout) for i in used)
    held = _state_bytes(cut, graphs, layout) + gathered + (grads if loss.wrt else 0)
    held += _result_bytes(cut, mesh) + _exchanged_bytes(cut, grads if loss.wrt else 0)
    return held + int(mesh_activation_bytes(footprints, cut.tasks[mesh]))


def mesh_activation_bytes(footprints: Mapping[int, Footprint], tasks: Sequence[Task]) -> float:
    """Return the peak activation memory of tasks in this order on one device, temporaries included.

    Args:
        footprints: the footprint of each stage, by stage.
        tasks: the tasks of the device's mesh.
    """
    level = peak = 0.0
    for stage, _, kind in tasks:
        if kind in footprints[stage].left:
            peak = max(peak, level + footprints[stage].working[kind])
            level += footprints[stage].left[kind]
    return peak


def _exchanged_bytes(cut: PartitionedStep, grads: int) -> int:
    """Return the bytes that a device holds twice while they go through parameter servers.

    They are the gradients, a worker's and the sums, and the batch leaves that the step reads whole.
    """
    if cut.slicing.workers == 1:
        return 0
    return grads + sum(nbytes(v.aval) for v, _ in cut.update.given if v not in cut.step.constants)


def _state_bytes(cut: PartitionedStep, graphs: Sequence[StageGraph], layout: Layout) -> int:
    """Return the bytes that a device holds all through the step.

    They are the arguments that live on the mesh or are sent there, and the batch, of which each
    replica has its rows.
    """
    (mesh,), outer = {graph.mesh for graph in graphs}, cut.update
    whole = [v for v, home in outer.homes.items() if home == mesh]
    batch = 0
    for operand in {outer.operands[i]: None for graph in graphs for i in graph.operands}:
        if operand.stacked:
            batch += nbytes(operand.value.aval) // (cut.slicing.replicas * layout.sizes[ROWS])
        elif outer.homes.get(operand.value, mesh) != mesh:
            whole.append(operand.value)
    return batch + sum(nbytes(v.aval) // parts(layout.outer(v), layout.sizes) for v in whole)


def _result_bytes(cut: PartitionedStep, mesh: int) -> int:
    """Return the bytes of the results of the loss that stages leave behind, a part a replica.

    Those that are not added up in place are there twice when the next part or the whole is made.
    """
    slicing, stages, total = cut.slicing, {graph.index for graph in cut.on_mesh(mesh)}, 0
    for (i, stage), left in cut.update.result_parts.items():
        in_place = slicing.replicas == 1 and cut.loss.reduce[i] in ("mean", "sum")
        copies = 1 if in_place or slicing.num_slices == 1 else 2
        if stage in stages:
            total += copies * sum(nbytes(v.aval) for v in left) // slicing.replicas
    return total


def _gradient_bytes(i: int, loss: Loss, layout: Layout) -> int:
    """Return the bytes of one gradient as it is accumulated."""
    aval = loss.invars[i].aval
    spec = layout.gradient(i) if layout.is_gathered(i) else layout.operand(i)
    size: int = aval.size * accumulator_dtype(aval.dtype).itemsize
    return size // parts(spec, layout.sizes)


def _gathered_bytes(graph: StageGraph, loss: Loss, layout: Layout) -> int:
    """Return the bytes of the parameters that a pass gathers.

    Their gradients before they are scattered are included.
    """
    found = [i for i in graph.operands if layout.is_gathered(i)]
    whole = sum(
        nbytes(loss.invars[i].aval) // parts(layout.operand(i), layout.sizes) for i in found
    )
    return 2 * whole if loss.wrt else whole
