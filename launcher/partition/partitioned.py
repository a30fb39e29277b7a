"""Cut a train step as an `Assignment` says: what every submesh computes, holds and exchanges.

`launcher.plan` prices it; `launcher.runtime` emits and compiles it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from launcher.partition.assignment import Assignment, PlanError, Slicing, validate
from launcher.partition.gradient_sync import (
    Bucket,
    GradientSync,
    in_buckets,
    is_summed_in_every,
    largest_ahead,
)
from launcher.partition.joint_graph import Known, Name, input_spec
from launcher.partition.layout import Layout, layouts, outer_dims
from launcher.partition.named_dims import NamedDims, Sharding, Spec
from launcher.partition.stages import StageGraph, cut_stages, lost_gradients
from launcher.partition.task_programs import (
    StagePrograms,
    StageUse,
    as_one,
    runs_as_one,
    trace_stage,
)
from launcher.partition.update import UpdateProgram, place_update
from launcher.schedule import Kind, Tasks, backward_follows
from launcher.trace import Loss, TracedStep, Var, is_var, nbytes

_MOST_NAMED = 4  # parameters in an error

Choose = Callable[[Loss, StageGraph], Mapping[str, Spec]]


@dataclass(frozen=True, eq=False)
class PartitionedStep:
    """See `partition`.

    Attributes:
        assignment: with the shardings of every stage, None where none were given or chosen.
        loss: of one slice of the batch.
        stages: what each stage computes and exchanges.
        layouts: of every submesh, the specs of all values.
        update: what runs around the pipeline: before the loss, and the parameter update.
        tasks: of every submesh, in order.
    """

    step: TracedStep
    assignment: Assignment
    loss: Loss
    stages: tuple[StageGraph, ...]
    layouts: tuple[Layout, ...]
    update: UpdateProgram
    tasks: Tasks

    @property
    def slicing(self) -> Slicing:
        """How the batch is cut."""
        return self.assignment.slicing

    def on_mesh(self, mesh: int) -> list[StageGraph]:
        """Return the stages of a submesh."""
        return [graph for graph in self.stages if graph.mesh == mesh]

    def layout(self, stage: int) -> Layout:
        """Return the layout of a stage's submesh."""
        return self.layouts[self.stages[stage].mesh]

    def kinds(self, stage: int) -> Set[Kind]:
        """Return the kinds of tasks that the schedule has for a stage."""
        tasks = self.tasks[self.stages[stage].mesh]
        return {task.kind for task in tasks if task.stage == stage}

    def goes_back_at_once(self, stage: int) -> bool:
        """Return whether a stage's backward pass directly follows its forward pass."""
        graph = self.stages[stage]
        return not graph.activations_out and backward_follows(self.tasks[graph.mesh], stage)

    def programs(self, stage: int, known: Known | None = None) -> tuple[StagePrograms, Sharding]:
        """Return a stage's task programs on one slice of the batch, and its joint graph's specs.

        `known` is the memo of `trace_joint`, for programs that are priced and not run.
        """
        graph, layout, kinds = self.stages[stage], self.layout(stage), self.kinds(stage)
        at_once = self.goes_back_at_once(stage)
        wanted = StageUse(self._grads(stage), self._varying(stage), self._results(stage))
        remat = self.assignment.remat[stage]
        of = trace_stage(graph, self.loss, remat, kinds, wanted, known)
        seeds = {v: input_spec(name, layout) for name, v in of.joint.inputs.items()}
        inside = layout.inside(of.joint.equations, seeds)
        if at_once and runs_as_one(of.programs[Kind.FORWARD], inside):
            of = as_one(of, kinds)
        # Among accumulators, XLA would sum the largest later all the same.
        if self.slicing.micro_batches == 1 < self.slicing.own_replicas:
            how = self.loss, layout, self.assignment.reduction
            programs = {kind: largest_ahead(one, *how) for kind, one in of.programs.items()}
            of = dataclasses.replace(of, programs=programs)
        return of, inside

    def gradient_sync(self, stage: int, orders: Iterable[Sequence[int]]) -> GradientSync:
        """Return how the gradients of a stage are summed; no bucket without replicas.

        Args:
            stage: the stage.
            orders: the `gradient_order` of each of its task programs, or of one of them.
        """
        every: list[Bucket] = []
        once: list[Bucket] = []
        layout, by = self.layout(stage), self.assignment.reduction
        for order in orders if self.slicing.replicas > 1 else ():
            in_every = [i for i in order if is_summed_in_every(layout, i)]
            every += in_buckets(in_every, self.loss, layout, by)
            in_one = [i for i in order if i not in in_every]
            once += in_buckets(in_one, self.loss, layout, by)
        return GradientSync(tuple(every), tuple(once), self.slicing, layout.between)

    def likeness(self, stage: int) -> object:
        """Return a key that is equal for stages with the same task programs, sharded alike."""
        graph, layout = self.stages[stage], self.layout(stage)
        names = [Name("operand", i) for i in graph.operands]
        names += [Name("activation", v) for v in graph.activations_in]
        grads, varying = set(self._grads(stage)), set(self._varying(stage))
        sliced, results = self.sliced, set(self._results(stage))
        return (
            graph.structure,
            tuple(input_spec(name, layout) for name in names),
            tuple(sorted(layout.sizes.items())),
            layout.between,
            self.assignment.remat[stage],
            self.goes_back_at_once(stage),
            tuple(sorted(kind.value for kind in self.kinds(stage))),
            tuple((i in grads, i in varying, i in sliced) for i in graph.operands),
            tuple(i in results for i in graph.results),
        )

    @property
    def sliced(self) -> Set[int]:
        """The operands of which each slice reads its rows."""
        return {i for i, axis in enumerate(self.loss.slice_axes) if axis is not None}

    @functools.cached_property
    def leaving(self) -> Set[int]:
        """The operands whose gradients are sent to others, or returned, as they are."""
        taken = {var for var, _, _ in self.update.part_sends}
        taken |= {v for v in self.update.outvars if is_var(v)}
        return {
            i
            for (i, _), parts in self.update.grad_parts.items()
            if self.slicing.workers > 1 or not taken.isdisjoint(parts)
        }

    def _grads(self, stage: int) -> list[int]:
        """Return the operands whose gradients the step uses."""
        return [i for i in self.stages[stage].wrt if (i, stage) in self.update.grad_parts]

    def _results(self, stage: int) -> list[int]:
        return [i for i, s in self.update.result_parts if s == stage]

    def _varying(self, stage: int) -> list[int]:
        """Return the operands that differ from slice to slice; of the only slice: may be data."""
        operands = self.stages[stage].operands
        if self.slicing.num_slices == 1:
            return [i for i in operands if i not in self.loss.wrt]
        return [i for i in operands if self.update.operands[i].stacked]


def partition(
    step: TracedStep,
    assignment: Assignment,
    choose: Choose | None = None,
    outer: NamedDims | None = None,
) -> PartitionedStep:
    """Cut a step.

    Args:
        step: the step, cut into the layers that the assignment is about.
        assignment: which layers run where, in which order, on which slices.
        choose: returns the shardings of a stage for which the assignment has none.
        outer: `outer_dims(step)`, where it is known.

    Raises:
        PlanError: the assignment cannot be carried out; the message says where.
        BatchError: the batch does not divide into microbatches and replicas.
    """
    tasks = validate(assignment, step)
    loss = step.loss(assignment.slicing.num_slices)
    graphs = cut_stages(loss, assignment.layers, assignment.mesh_of)
    if lost := lost_gradients(loss, graphs):
        names = ", ".join(step.operand_names[i] for i in lost[:_MOST_NAMED])
        raise PlanError(
            f"these stages would lose the gradient of {names}, which has one on one device: no "
            "gradient comes back for what a stage hands on. Please report it, with the step"
        )
    shardings = []
    for graph in graphs:
        given = assignment.shardings_of(graph.index)
        shardings.append(choose(loss, graph) if given is None and choose else given)
    assignment = dataclasses.replace(assignment, shardings=tuple(shardings))
    laid = layouts(step, loss, assignment, outer or outer_dims(step))
    pinned = {}
    if not loss.num_layers:  # no stage says where an argument lives: the assignment does
        pinned = {v: mesh for mesh, layout in enumerate(laid) for v in layout.explicit}
    update = place_update(step, loss, graphs, assignment.slicing, pinned)
    return PartitionedStep(step, assignment, loss, graphs, laid, update, tasks)


@dataclass(frozen=True)
class Exchanged:
    """Values that cross together.

    Attributes:
        when: "before": the batch's leaves, before the step; "update": what its loss makes.
        kind: "sum" or "gather".
        values: of every value its part, of all replicas where they are gathered, or batch leaf.
        dtype: the type in which they cross.
        nbytes: bytes of one worker's part.
    """

    when: str
    kind: str
    values: tuple[Var, ...]
    dtype: str
    nbytes: int


def exchanges(cut: PartitionedStep, once: Sequence[Bucket]) -> tuple[Exchanged, ...]:
    """Return what workers exchange through parameter servers in a step, in order.

    A worker runs its share of the replicas as data parallelism does, and sums their gradients
    first. There remain the buckets of gradients, the results of the loss, a row for each replica,
    and the batch leaves that the rest of the step reads whole. One worker exchanges nothing.

    Args:
        cut: the partitioned step, of one stage.
        once: the buckets of gradients that are summed once a step.
    """
    workers, update = cut.slicing.workers, cut.update
    if workers == 1:
        return ()
    leaves = [v for v, _ in update.given if v not in cut.step.constants]
    results = [v for parts in update.result_parts.values() for v in parts]
    grads = {i: v for (i, _), (v,) in update.grad_parts.items()}
    sums = [
        Exchanged("update", "sum", tuple(grads[i] for i in b.operands), b.dtype, b.nbytes)
        for b in once
    ]
    return (
        *_gathered("before", [v for v in leaves if v.aval.shape], workers),
        *sums,
        *_gathered("update", results, workers),
    )


def _gathered(when: str, values: Sequence[Var], workers: int) -> list[Exchanged]:
    """Return values that cross in one message, as bytes, whatever their types."""
    size = sum(nbytes(v.aval) for v in values) // workers
    return [Exchanged(when, "gather", tuple(values), "uint8", size)] if values else []


def shared_out(sizes: Sequence[int], servers: int) -> tuple[int, ...]:
    """Return the server of each exchange: the largest first, each to the one with least so far.

    No server has more than the mean and the largest exchange.

    Args:
        sizes: the bytes of each exchange.
        servers: the number of servers.
    """
    loads, found = [0] * servers, [0] * len(sizes)
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        found[k] = min(range(servers), key=lambda server: loads[server])
        loads[found[k]] += sizes[k]
    return tuple(found)
