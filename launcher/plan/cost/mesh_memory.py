"""Peak memory of a submesh on each of its devices, estimated from shapes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from launcher.partition import (
    DATA,
    MODEL,
    ROWS,
    Bucket,
    GradientSync,
    Layout,
    PartitionedStep,
    Pieces,
    StageGraph,
    accumulator_dtype,
    gradients,
    is_flat,
    is_summed_in_every,
    is_summed_in_place,
    parts,
    stays_packed,
)
from launcher.plan.cost.liveness import Liveness
from launcher.plan.cost.stage_memory import Footprint, Summed
from launcher.schedule import Kind, Task, Tasks, simulate
from launcher.trace import (
    FUSED,
    REDUCTIONS,
    Equation,
    Loss,
    TracedStep,
    Var,
    is_var,
    nbytes,
    needed,
)


class UpdateMemory:
    """What of a step's update is stored while it runs, wherever that is.

    Element-wise equations are fused into each other and write over the state: the update of most
    optimizers stores nothing but what sums read.

    Args:
        step: the step.
        on_gpu: see `Liveness`.
    """

    def __init__(self, step: TracedStep, on_gpu: bool) -> None:
        self._results = {v for v in step.outvars if is_var(v)}  # they are counted where they lie
        self._gradients = gradients(step)
        storing = [v for eqn in step.after if _stores(eqn, not on_gpu) for v in eqn.outvars]
        self._liveness = Liveness(
            needed(step.after, storing), [], as_soon=not on_gpu, on_gpu=on_gpu
        )

    @property
    def share(self) -> float:
        """The bytes of what is stored, of those of all gradients."""
        whole = sum(nbytes(v.aval) for v in self._gradients.values())
        stored = self._liveness.peak(lambda v: 0.0 if v in self._results else nbytes(v.aval))
        return stored / whole if whole else 0.0

    def bytes(self, pieces: Pieces, mesh: int) -> float:
        """Return what the update needs on a device of a mesh, beside the state and gradients.

        Every piece of a stage has an update of its own.

        Args:
            pieces: the partitioned step, its stages cut into pieces where they are.
            mesh: the mesh.
        """
        layout, owners = pieces.cut.layouts[mesh], pieces.owners
        groups = self._of_pieces(owners) if owners else [self._of_mesh(pieces.cut, mesh)]

        def peak(of: set[Var]) -> float:
            return self._liveness.peak(
                lambda v: _bytes(v, layout) if v in of and v not in self._results else 0.0
            )

        return max(map(peak, groups), default=0.0) + _fresh_bytes(pieces.cut, mesh)

    def _of_mesh(self, cut: PartitionedStep, mesh: int) -> set[Var]:
        segments = [of for of in cut.update.after if of.mesh == mesh]
        return {v for of in segments for eqn in of.equations for v in eqn.outvars}

    def _of_pieces(self, owners: Mapping[Var, int]) -> list[set[Var]]:
        """Return what is computed from the gradients of each piece."""
        piece = {g: owners[v] for v, g in self._gradients.items() if v in owners}
        found: dict[int, set[Var]] = {}
        for eqn in self._liveness.equations:
            own = next((piece[v] for v in eqn.invars if is_var(v) and v in piece), None)
            if own is not None:
                piece.update(dict.fromkeys(eqn.outvars, own))
                found.setdefault(own, set()).update(eqn.outvars)
        return list(found.values())


def _stores(eqn: Equation, as_soon: bool) -> bool:
    """Return whether the compiler stores what an equation reads or makes."""
    name = eqn.primitive.name
    return name not in FUSED and (as_soon or name not in REDUCTIONS)


def _fresh_bytes(cut: PartitionedStep, mesh: int) -> float:
    """Return the bytes of the update's results that take no argument's place, nor a gradient's."""
    layout, update, step = cut.layouts[mesh], cut.update, cut.step
    made = {v for segment in update.after for eqn in segment.equations for v in eqn.outvars}
    fresh = [
        v
        for i, (v, home) in enumerate(zip(update.outvars, update.out_homes, strict=True))
        if home == mesh and i not in step.aliases and is_var(v) and v in made
    ]
    whole = gradients(step)
    spare = Counter(
        _likeness(whole[step.operands[i]], layout)
        for i, stage in (update.grad_parts if fresh else ())
        if cut.stages[stage].mesh == mesh
    )
    total = 0.0
    for v in fresh:
        spare[_likeness(v, layout)] -= 1
        total += _bytes(v, layout) if spare[_likeness(v, layout)] < 0 else 0.0
    return total


def _likeness(v: Var, layout: Layout) -> object:
    return v.aval.shape, v.aval.dtype, layout.outer(v)


def _bytes(v: Var, layout: Layout) -> float:
    return nbytes(v.aval) / parts(layout.outer(v), layout.sizes)


def mesh_memory(
    pieces: Pieces,
    mesh: int,
    footprints: Mapping[int, Footprint],
    sums: Sequence[GradientSync],
    update: UpdateMemory,
    waiting: Mapping[Task, float],
    on_gpu: bool,
) -> int:
    """Return the peak memory of one device of a submesh, in bytes.

    It holds the state that lives there all through the step. While tasks run there are also the
    batch, the accumulators (of gradients, and of results, such as a model's new state), the
    activations of the microbatches in flight, and the peak temporaries of the tasks. Then there are
    the gradients as they are summed over the replicas, and at last the sums with what the update
    stores.

    Args:
        pieces: the partitioned step, its stages cut into pieces where they are.
        mesh: index of the submesh.
        footprints: the footprint of each piece.
        sums: the sums of the gradients of each piece.
        update: what the step's update stores.
        waiting: see `waiting_bytes`.
        on_gpu: whether XLA:GPU compiles its programs; the footprints then count parameters that are
            gathered.
    """
    cut = pieces.cut
    graphs, layout, loss = cut.on_mesh(mesh), cut.layouts[mesh], cut.loss
    gathered = max(
        _scattered_bytes(sums[graph.index]) if on_gpu else _gathered_bytes(graph, loss, layout)
        for graph in graphs
    )
    stages = {graph.index for graph in graphs}
    used = [i for i, stage in cut.update.grad_parts if stage in stages]
    grads = sum(_gradient_bytes(i, cut, layout, summed=False) for i in used)
    summed = sum(_gradient_bytes(i, cut, layout, summed=True) for i in used)
    exchanged = _exchanged_bytes(cut, grads)
    batch, state = _held_bytes(cut, graphs, layout)
    batch = 0 if _is_afresh(cut) else batch  # each task counts what it reads of its slice
    held = state + _result_bytes(cut, mesh) + exchanged
    own = graphs if cut.slicing.own_replicas > 1 else []
    of_sums = {graph.index: _sums(cut, graph.index, sums[graph.index], on_gpu) for graph in own}
    made = summed if _is_afresh(cut) else grads
    beside = {s: one for s, one in of_sums.items() if one.beside}
    working = mesh_activation_bytes(footprints, cut.tasks[mesh], beside, waiting)
    running = batch + gathered + made + working
    after = (one.fresh + one.working for s, one in of_sums.items() if s not in beside)
    summing = max(after, default=0.0)
    updating = summed + update.bytes(pieces, mesh)
    return int(held + max(running, grads + summing, updating))


def summed_how(cut: PartitionedStep, stage: int, sync: GradientSync, on_gpu: bool) -> Summed:
    """Return how a stage's gradients are made and summed in its backward passes.

    XLA:GPU puts off products and convolutions of gradients, to run them under the sums: to where
    the program ties a bucket to the pass, if it has several or collectives of a model axis.

    Args:
        cut: the partitioned step.
        stage: the stage.
        sync: how its gradients are summed.
        on_gpu: whether XLA:GPU compiles its programs.
    """
    layout, operands = cut.layout(stage), cut.stages[stage].operands
    alone = _is_afresh(cut)
    gathered = {i for i in operands if layout.is_gathered(i)}
    afresh = {i for i in operands if alone or is_summed_in_every(layout, i)}
    if not on_gpu:
        return Summed(afresh)
    together, last = ([{*of.operands} for of in sync.in_pass(k)] for k in (alone, True))
    if len(together) == 1 and layout.sizes[MODEL] == 1:
        together = []
    return Summed(afresh - gathered, gathered, together, [] if alone or len(last) == 1 else last)


class Sums(NamedTuple):
    """What summing a stage's gradients over the replicas needs.

    Attributes:
        fresh: bytes of the sums that do not take the place of each replica's gradients.
        working: bytes of the temporaries.
        beside: whether the last backward pass does it, rather than a program of its own.
    """

    fresh: float
    working: float
    beside: bool


def _sums(cut: PartitionedStep, stage: int, sync: GradientSync, on_gpu: bool) -> Sums:
    """Return what the buckets that a stage sums once a step need.

    A bucket is packed, and what the collective makes of it unpacked before the pass continues. One
    gradient is summed where it is, but XLA:GPU makes two copies if the rest of the pass waits for
    it; those of a layer that is recomputed are there at once. The gradients of the only microbatch
    are there before they are summed, and their sums are not unpacked.
    """
    layout, afresh, once = cut.layout(stage), _is_afresh(cut), sync.once
    replicas, beside = layout.sizes[DATA], sync.backward_sums_once
    ties = on_gpu and beside and cut.assignment.remat[stage] == "none"
    together = sync.in_pass(last=True) if beside else once

    def working(bucket: Bucket) -> float:
        scatters = bucket.collective == "reduce-scatter"
        flat = is_flat(bucket, together)  # else it is summed in its place
        if afresh:
            unpacks = not stays_packed(bucket, together, cut.slicing, cut.leaving)
            return bucket.nbytes * (2 if scatters or (flat and unpacks) else 1)
        in_place = all(is_summed_in_place(layout, i, cut.leaving) for i in bucket.operands)
        waited = ties and bucket is not together[-1] and in_place
        return bucket.nbytes * (1 + 1 / replicas if scatters else 2 * (flat or waited))

    fresh = 0
    if not afresh:  # those of the only microbatch are counted as the gradients
        fresh = sum(
            _gradient_bytes(i, cut, layout, summed=True)
            for bucket in once
            for i in bucket.operands
            if not beside or not is_summed_in_place(layout, i, cut.leaving)
        )
    return Sums(fresh, max(map(working, once), default=0.0), beside)


def _is_afresh(cut: PartitionedStep) -> bool:
    """Return whether the only microbatch makes the gradients, and nothing is accumulated."""
    return cut.slicing.micro_batches == 1


def mesh_activation_bytes(
    footprints: Mapping[int, Footprint],
    tasks: Sequence[Task],
    sums: Mapping[int, Sums] = MappingProxyType({}),
    waiting: Mapping[Task, float] = MappingProxyType({}),
) -> float:
    """Return the peak activation memory of tasks in this order on one device, temporaries included.

    Args:
        footprints: the footprint of each stage, by stage.
        tasks: the tasks of the device's mesh.
        sums: the sums that the last task of a stage makes, by stage.
        waiting: see `waiting_bytes`.
    """
    listed = [task for task in tasks if task[2] in footprints[task[0]].left]
    last = {stage: place for place, (stage, _, _) in enumerate(listed)}
    level = peak = 0.0
    for place, (stage, _, kind) in enumerate(listed):
        more = sums.get(stage) if place == last[stage] else None
        level += more.fresh if more else 0.0
        own = footprints[stage]
        working = (
            own.last.get(kind, own.working[kind]) + more.working if more else own.working[kind]
        )
        peak = max(peak, level + working + waiting.get(listed[place], 0.0))
        level += footprints[stage].left[kind]
    return peak


def waiting_bytes(footprints: Mapping[int, Footprint], tasks: Tasks) -> dict[Task, float]:
    """Return for every task the bytes of activations on its mesh that later tasks will read.

    They arrive as soon as they are computed. A backward pass counts as two forward passes.
    """
    mesh_of = {task.stage: mesh for mesh, of in enumerate(tasks) for task in of}
    level, found = [0.0] * len(tasks), {}
    for task, mesh, *_ in simulate(tasks, lambda task: 1.0 + (task.kind is Kind.BACKWARD)):
        if task.kind is Kind.FORWARD:
            level[mesh] -= footprints[task.stage].arriving
        found[task] = level[mesh]
        if task.kind is Kind.FORWARD and task.stage + 1 in mesh_of:
            level[mesh_of[task.stage + 1]] += footprints[task.stage + 1].arriving
    return found


def _exchanged_bytes(cut: PartitionedStep, grads: int) -> int:
    """Return the bytes that a device holds twice while they go through parameter servers.

    They are the gradients, a worker's and the sums, and the batch leaves that the step reads whole.
    """
    if cut.slicing.workers == 1:
        return 0
    return grads + sum(nbytes(v.aval) for v, _ in cut.update.given if v not in cut.step.constants)


def _held_bytes(
    cut: PartitionedStep, graphs: Sequence[StageGraph], layout: Layout
) -> tuple[int, int]:
    """Return the bytes of the batch, and those that a device holds all through the step.

    The latter are the arguments that live on the mesh or are sent there. Each replica has
    its rows of the batch.
    """
    (mesh,), outer = {graph.mesh for graph in graphs}, cut.update
    whole = [v for v, home in outer.homes.items() if home == mesh]
    batch = 0
    for operand in {outer.operands[i]: None for graph in graphs for i in graph.operands}:
        if operand.stacked:
            batch += nbytes(operand.value.aval) // (cut.slicing.replicas * layout.sizes[ROWS])
        elif outer.homes.get(operand.value, mesh) != mesh:
            whole.append(operand.value)
    return batch, sum(nbytes(v.aval) // parts(layout.outer(v), layout.sizes) for v in whole)


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


def _gradient_bytes(i: int, cut: PartitionedStep, layout: Layout, summed: bool) -> int:
    """Return the bytes of one gradient as it is accumulated, or summed over the replicas."""
    aval = cut.loss.invars[i].aval
    whole = layout.is_gathered(i) or (summed and layout.is_scattered(i))
    spec = layout.gradient(i) if whole else layout.operand(i)
    dtype = accumulator_dtype(aval.dtype) if cut.slicing.num_slices > 1 else aval.dtype
    size: int = aval.size * dtype.itemsize
    return size // parts(spec, layout.sizes)


def _scattered_bytes(sync: GradientSync) -> int:
    """Return the bytes of a bucket that is scattered while the gradients of the next are made."""
    return max((bucket.nbytes for bucket in sync.every[:-1]), default=0)


def _gathered_bytes(graph: StageGraph, loss: Loss, layout: Layout) -> int:
    """Return the bytes of the parameters that a pass gathers.

    Their gradients before they are scattered are included.
    """
    found = [i for i in graph.operands if layout.is_gathered(i)]
    whole = sum(
        nbytes(loss.invars[i].aval) // parts(layout.operand(i), layout.sizes) for i in found
    )
    return 2 * whole if loss.wrt else whole
