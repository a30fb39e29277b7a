"""Shardings of a stage's arguments: the contents of its `StagePlan.shardings`.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.hardware import ClusterShape
from launcher.partition import (
    MODEL,
    Assignment,
    NamedDims,
    PlanError,
    Sharding,
    Spec,
    StageGraph,
    batch_axes,
)
from launcher.plan.cost.collectives import flow
from launcher.plan.cost.stage_seconds import links_of
from launcher.plan.intra_op.sequence_parallel import batch_specs, sequence_class, sequence_sharding
from launcher.plan.intra_op.solver import along_data, model_classes
from launcher.trace import Loss, TracedStep, Var, leaf_names


class StageShardings:
    """Chooser of the shardings of an assignment's stages.

    Stages that are the same program are solved once.

    Args:
        step: the traced step.
        assignment: the stages and their submeshes.
        cluster: the rates of the devices.
        outer: the step's named dimensions outside of the loss.
    """

    def __init__(
        self, step: TracedStep, assignment: Assignment, cluster: ClusterShape, outer: NamedDims
    ) -> None:
        self._step = step
        self._assignment = assignment
        self._cluster = cluster
        self._outer = outer
        self._inner: NamedDims | None = None
        self._solved: dict[object, list[Spec]] = {}

    def __call__(self, loss: Loss, graph: StageGraph) -> dict[str, Spec]:
        """Return the specs of the arguments that belong to a stage.

        They are its parameters, what the update keeps for them, and the batch. A stage on one
        device has no specs.

        Raises:
            PlanError: the data cannot be cut along a sequence, as the assignment has it.
        """
        step, assignment = self._step, self._assignment
        submesh, zero = assignment.submeshes[graph.mesh], assignment.zero_of(graph.index)
        data, model = submesh.logical_mesh
        if data * model == 1:
            return {}
        batch: dict[Var, Spec] = {}
        if assignment.sequence_of(graph.index):
            specs, batch = self._along_sequence(loss, graph, model)
        else:
            specs = self._solution(loss, graph, model, links_of(submesh, self._cluster).model)
        operands = dict(zip(graph.operands, specs, strict=True))
        return argument_specs(
            step, loss, graph, operands, submesh.logical_mesh, zero, self._outer, batch
        )

    def _along_sequence(
        self, loss: Loss, graph: StageGraph, model: int
    ) -> tuple[list[Spec], dict[Var, Spec]]:
        """Return a stage's operand specs, and the batch's, cut along the data's sequence."""
        if self._inner is None:
            self._inner = NamedDims(loss.equations)
        of = sequence_class(self._step, loss, self._inner, model)
        if of is None:
            raise PlanError(f"the data has no dimension beside its rows that {model} devices share")
        cut = sequence_sharding(graph, loss, self._inner, of, model)
        specs = [cut.spec(loss.invars[i]) for i in graph.operands]
        return specs, batch_specs(self._step, loss, self._inner, of)

    def _solution(self, loss: Loss, graph: StageGraph, model: int, link: float) -> list[Spec]:
        """Return the specs of a stage's operands along the model axis.

        The links of the axis have `link` bytes/s.
        """
        rows = batch_axes(self._step, loss)
        key = graph.structure, tuple(rows[i] for i in graph.operands), model, link
        if key not in self._solved:
            cut = model_sharding(self._step, loss, graph, model, self._cluster, link)
            self._solved[key] = [cut.spec(loss.invars[i]) for i in graph.operands]
        return self._solved[key]


def model_sharding(
    step: TracedStep,
    loss: Loss,
    graph: StageGraph,
    model: int,
    cluster: ClusterShape,
    link: float,
) -> Sharding:
    """Return what a stage's program cuts along the model axis."""
    dims = NamedDims(graph.equations)
    cut = Sharding(dims, {MODEL: model})
    if model > 1:
        parameters = [loss.invars[i] for i in graph.wrt]
        flows = flow(graph.equations, [*parameters, *graph.active_in])
        batch = row_classes(step, loss, graph, dims)
        for of in model_classes(dims, parameters, batch, flows, model, cluster, link):
            cut.axis_of[of] = (MODEL,)
    return cut


def row_classes(step: TracedStep, loss: Loss, graph: StageGraph, dims: NamedDims) -> set[int]:
    """Return the classes of the batch's rows in a stage."""
    rows = batch_axes(step, loss)
    sliced = [(loss.invars[i], rows[i]) for i in graph.operands]
    return {dims.classes(v)[axis] for v, axis in sliced if axis is not None}


def argument_specs(  # noqa: PLR0913 (each is one fact of the stage)
    step: TracedStep,
    loss: Loss,
    graph: StageGraph,
    operands: Mapping[int, Spec],
    logical_mesh: tuple[int, int],
    zero: int,
    dims: NamedDims,
    batch: Mapping[Var, Spec],
) -> dict[str, Spec]:
    """Return the specs of a stage's arguments, given those of the loss's operands.

    Args:
        step: the traced step.
        loss: its loss.
        graph: the stage.
        operands: specs of the stage's operands along the model axis, by index.
        logical_mesh: (data, model) of the stage's submesh.
        zero: ZeRO level of the stage: 0, 2 or 3.
        dims: the step's named dimensions outside of the loss.
        batch: specs of leaves of the batch along the model axis; they determine those of the
            activations as well, and are therefore listed with every stage.
    """
    data, model = logical_mesh
    holders = {i: step.operands[i] for i in graph.operands}
    kept = Sharding(dims, {MODEL: model})
    cut = Sharding(dims, {MODEL: model, "data": data})
    for i, spec in operands.items():
        if loss.slice_axes[i] is None:
            kept.seed(holders[i], spec)
            cut.seed(holders[i], spec)
            target = along_data(loss.invars[i].aval.shape, spec, data, model)
            if zero and data > 1 and i in loss.wrt and target:
                cut.seed(holders[i], target)
    parameters = {holders[i] for i in graph.wrt}
    own = {c for i in graph.operands for c in dims.classes(holders[i])}
    found: dict[str, Spec] = {}
    arguments = zip(leaf_names(step), step.invars, step.batch, strict=True)
    for name, var, is_batch in arguments:
        if is_batch:
            if var in batch or (var in holders.values() and var.aval.shape):
                found[name] = _batch_spec(var, data, batch.get(var, ()))
            continue
        spec = (cut if zero == 3 or (zero and var not in parameters) else kept).spec(var)
        if var in parameters or (any(spec) and own & set(dims.classes(var))):
            found[name] = spec
    return found


def _batch_spec(var: Var, data: int, along: Spec) -> Spec:
    rows = "data" if data > 1 and var.aval.shape[0] % data == 0 else None
    return (rows, *(along[1:] or (None for _ in var.aval.shape[1:])))
