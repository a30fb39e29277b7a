"""How a stage's arguments are cut: what its `StagePlan.shardings` says. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.partition.errors import PlanError
from launcher.partition.sharding.layout import MODEL, row_axes
from launcher.partition.sharding.named_dims import NamedDims, Sharding, Spec
from launcher.partition.stages import StageGraph
from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.cost.collectives import flow
from launcher.plan.intra_op.sequence_parallel import batch_specs, sequence_class, sequence_sharding
from launcher.plan.intra_op.solver import along_data, model_classes
from launcher.trace.graph import Var
from launcher.trace.leaf_names import leaf_names
from launcher.trace.step import Loss, TracedStep

# The specs of the operands of stages that are the same program, by what they follow from.
KnownCuts = dict[object, list[Spec]]


def stage_shardings(
    step: TracedStep,
    loss: Loss,
    graph: StageGraph,
    logical_mesh: tuple[int, int],
    zero: int,
    cluster: ClusterShape,
    link: float,
    outer: NamedDims,
    known: KnownCuts,
    sequence: NamedDims | None = None,
) -> dict[str, Spec]:
    """The specs of the arguments that belong to a stage: its parameters, what the update keeps for
    them, and the batch. Nothing is said of a stage on one device.

    Args:
        zero: see `Assignment`. link: bytes/s between the submesh's devices. outer: the step's named
            dimensions outside of the loss. known: what was chosen so far. sequence: the loss's
            named dimensions, where the data is to be cut along its sequence.
    """
    data, model = logical_mesh
    if data * model == 1:
        return {}
    rows = row_axes(step, loss)
    batch: dict[Var, Spec] = {}
    if sequence is not None:
        of = sequence_class(step, loss, sequence, model)
        if of is None:
            raise PlanError(f"the data has no dimension beside its rows that {model} devices share")
        batch = batch_specs(step, loss, sequence, of)
        cut = sequence_sharding(graph, loss, sequence, of, model)
        specs = [cut.spec(loss.invars[i]) for i in graph.operands]
    else:
        key = graph.structure, tuple(rows[i] for i in graph.operands), model, link
        if key not in known:
            cut = model_sharding(step, loss, graph, model, cluster, link)
            known[key] = [cut.spec(loss.invars[i]) for i in graph.operands]
        specs = known[key]
    operands = dict(zip(graph.operands, specs, strict=True))
    return argument_specs(step, loss, graph, operands, logical_mesh, zero, outer, batch)


def model_sharding(
    step: TracedStep,
    loss: Loss,
    graph: StageGraph,
    model: int,
    cluster: ClusterShape,
    link: float,
) -> Sharding:
    """What a stage's program cuts along the model axis."""
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
    """The classes of the batch's rows in a stage."""
    rows = row_axes(step, loss)
    sliced = [(loss.invars[i], rows[i]) for i in graph.operands]
    return {dims.classes(v)[axis] for v, axis in sliced if axis is not None}


def argument_specs(
    step: TracedStep,
    loss: Loss,
    graph: StageGraph,
    operands: Mapping[int, Spec],
    logical_mesh: tuple[int, int],
    zero: int,
    dims: NamedDims,
    batch: Mapping[Var, Spec],
) -> dict[str, Spec]:
    """The specs of a stage's arguments, by those of the loss's operands along the model axis.

    Args:
        batch: of leaves of the batch, along the model axis; they say it of the activations, and so
            stand with every stage.
    """
    data, model = logical_mesh
    holders = {i: step.loss_equation.invars[i] for i in graph.operands}
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
