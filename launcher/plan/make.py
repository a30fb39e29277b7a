"""Completing a plan: from a method's outline to shardings, transfers, memory and predictions.

Pure; needs no device. Used by `plan.methods` and the planner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.errors import PlanError
from launcher.plan.footprint import Footprint
from launcher.plan.memory import Known, mesh_memory
from launcher.plan.outer import OuterProgram, Slicing, place_outer
from launcher.plan.outline import Outline, Submesh
from launcher.plan.plan import Plan, StagePlan, Transfer
from launcher.plan.predict import (
    StageSeconds,
    links_of,
    stage_seconds,
    update_seconds,
    with_predictions,
)
from launcher.plan.profile.measured import MeasuredLayers
from launcher.plan.remat import recomputed
from launcher.plan.sharding.dims import NamedDims, Spec
from launcher.plan.sharding.layout import MODEL, ROWS, Layout, layouts, outer_dims
from launcher.plan.sharding.names import leaf_names
from launcher.plan.sharding.stage import KnownCuts, stage_shardings
from launcher.plan.stages import StageGraph, cut_stages
from launcher.schedule import FORWARD_SCHEDULE, SCHEDULES, Kind, Tasks, backward_follows, make_tasks
from launcher.trace.cost import matmul_flops
from launcher.trace.graph import Equation, nbytes, source_line
from launcher.trace.step import Loss, TracedStep


def complete(
    step: TracedStep,
    outline: Outline,
    cluster: ClusterShape,
    measured: MeasuredLayers | None = None,
    known: Known | None = None,
) -> Plan:
    """The plan of an outline.

    Args:
        measured: the layers' seconds, instead of the model's. known: what other plans of this step
            have found out about their stages' memory, and this one adds to.

    Raises:
        PlanError: its schedule cannot run its stages, a sharding that was given does not fit, or a
            layer could not be measured.
        BatchError: the batch does not divide into microbatches and replicas.
    """
    cluster = measured.shape(cluster) if measured else cluster
    slicing = Slicing(outline.num_micro_batches, outline.num_replicas)
    loss = step.loss(slicing.num_slices)
    graphs = cut_stages(loss, outline.layers, outline.mesh_of)
    schedule = _schedule(outline)
    dims = outer_dims(step)
    shardings = _shardings(step, loss, graphs, outline, cluster, dims)
    draft = _draft(step, loss, graphs, outline, cluster, shardings)
    draft.validate(step)
    if measured:
        draft = dataclasses.replace(draft, profiled=measured.account())
    laid = layouts(step, loss, draft, dims)
    outer = place_outer(step, loss, graphs, slicing, lambda i, mesh: laid[mesh].is_scattered(i))
    again = _computed_again(graphs, outline.remat, schedule)
    known = {} if known is None else known
    memory = _memory(graphs, outline, schedule, loss, outer, laid, known)
    stages = _described(draft, step, loss, graphs, outer, laid, outline, memory, again, measured)
    trained = bool(loss.wrt)
    flops = sum(matmul_flops(g.equations) for g in graphs) * slicing.num_slices
    flops_again = sum(matmul_flops(equations) for equations in again) * slicing.num_slices
    plan = dataclasses.replace(
        draft,
        num_parameters=sum(stage.num_parameters for stage in stages),
        stages=tuple(stages),
        transfers=_transfers(graphs, outer, slicing, trained),
        flops_per_step=flops * (3 if trained else 1),
        notes=_notes(laid),
    )
    return with_predictions(plan, plan.flops_per_step + (flops_again if trained else 0.0))


def _shardings(
    step: TracedStep,
    loss: Loss,
    graphs: Sequence[StageGraph],
    outline: Outline,
    cluster: ClusterShape,
    dims: NamedDims,
) -> list[Mapping[str, Spec]]:
    """How the arguments of every stage are cut: as the outline says, or as is best."""
    known: KnownCuts = {}
    inner = NamedDims(loss.equations) if any(outline.sequence) else None
    found: list[Mapping[str, Spec]] = []
    for graph in graphs:
        submesh = outline.submeshes[graph.mesh]
        given = outline.shardings[graph.index] if outline.shardings else None
        if given is None:
            given = stage_shardings(
                step,
                loss,
                graph,
                submesh.logical_mesh,
                outline.zero_of(graph.index),
                cluster,
                links_of(submesh, cluster).model,
                dims,
                known,
                inner if outline.sequence_of(graph.index) else None,
            )
        found.append(given)
    return found


def _notes(laid: Sequence[Layout]) -> tuple[str, ...]:
    """What is computed on every device of a submesh because no rule says how to cut it."""
    shared = [layout for layout in laid if layout.sizes[MODEL] * layout.sizes[ROWS] > 1]
    unknown = {
        f"{use.eqn.primitive.name} at {source_line(use.eqn)} is not cut: every device of a submesh "
        "computes it whole"
        for layout in shared[:1]
        for use in layout.loss_dims.uses
        if use.factors is None
    }
    return tuple(sorted(unknown))


def make_forward_plan(step: TracedStep, like: Plan) -> Plan:
    """An evaluation step's plan on the stages of a train step's, so that it finds its parameters.

    Raises:
        PlanError: the two do not have the same layers.
    """
    step = step.cut_at(like.layer_ends)
    num_layers = step.loss(1).num_layers
    planned = sum(len(stage.layers) for stage in like.stages)
    if num_layers != planned:
        raise PlanError(
            f"the evaluation step has {num_layers} layers and the train step {planned}; both must "
            "run the same model"
        )
    outline = dataclasses.replace(
        _outline_of(like),
        schedule=FORWARD_SCHEDULE,
        remat=("none",) * len(like.stages),
        shardings=tuple(_renamed(stage.shardings, leaf_names(step)) for stage in like.stages),
    )
    return complete(step, outline, ClusterShape(**like.cluster))


def repriced(step: TracedStep, plan: Plan, measured: MeasuredLayers) -> Plan:
    """The same plan with predictions from measured layers.

    Raises:
        PlanError: one of its layers could not be measured.
    """
    step, cluster = step.cut_at(plan.layer_ends), ClusterShape(**plan.cluster)
    return dataclasses.replace(
        complete(step, _outline_of(plan), cluster, measured), runners_up=plan.runners_up
    )


def _outline_of(plan: Plan) -> Outline:
    """What a plan's method decided, and how its arguments are cut."""
    shape = {stage.devices: stage.logical_mesh for stage in plan.stages}
    return Outline(
        method=plan.method,
        layers=tuple(stage.layers for stage in plan.stages),
        submeshes=tuple(Submesh(devices, shape[devices]) for devices in plan.meshes),
        mesh_of=plan.mesh_of,
        num_micro_batches=plan.num_micro_batches,
        schedule=plan.schedule,
        remat=tuple(stage.remat for stage in plan.stages),
        shardings=tuple(stage.shardings for stage in plan.stages),
    )


def _renamed(shardings: Mapping[str, Spec], names: Sequence[str]) -> dict[str, Spec]:
    """The specs of another step's arguments for this one's: a leaf is known by its path, with the
    fewest steps before it (a parameter stands less deep than what the optimizer keeps for it)."""
    found = {}
    for name in names:
        path = name.partition(".")[2]
        same = [other for other in shardings if path and f".{other}".endswith(f".{path}")]
        if same:
            found[name] = shardings[min(same, key=len)]
    return found


def _schedule(outline: Outline) -> Tasks:
    count = len(outline.submeshes)
    if outline.mesh_of != tuple(s % count for s in range(len(outline.mesh_of))):
        raise PlanError(
            f"stages on the same devices must come round in turn; {len(outline.mesh_of)} stages "
            f"are on meshes {', '.join(map(str, outline.mesh_of))}"
        )
    return make_tasks(outline.schedule, len(outline.layers), count, outline.num_micro_batches)


def _draft(
    step: TracedStep,
    loss: Loss,
    graphs: Sequence[StageGraph],
    outline: Outline,
    cluster: ClusterShape,
    shardings: Sequence[Mapping[str, Spec]],
) -> Plan:
    """The plan without anything that is predicted."""
    owner = {i: g.index for g in reversed(graphs) for i in g.operands}
    stages = []
    for graph in graphs:
        s, submesh = graph.index, outline.submeshes[graph.mesh]
        own = [i for i in loss.wrt if owner.get(i, 0) == s]
        stages.append(
            StagePlan(
                layers=outline.layers[s],
                hosts=tuple(sorted({cluster.host_of(d) for d in submesh.devices})),
                devices=submesh.devices,
                logical_mesh=submesh.logical_mesh,
                remat=outline.remat[s],
                forward_seconds=0.0,
                backward_seconds=0.0,
                backward_weight_seconds=0.0,
                update_seconds=0.0,
                memory_bytes=0,
                num_parameters=sum(loss.invars[i].aval.size for i in own),
                shardings=dict(shardings[s]),
            )
        )
    return Plan.unpredicted(
        method=outline.method,
        schedule=outline.schedule,
        num_micro_batches=outline.num_micro_batches,
        batch_size=step.batch_size,
        stages=tuple(stages),
        cluster=cluster,
        fingerprint=step.fingerprint,
        layer_ends=step.layer_ends,
    )


def _computed_again(
    graphs: Sequence[StageGraph], remat: Sequence[str], schedule: Tasks
) -> list[list[Equation]]:
    """What each stage's backward pass computes again: nothing where it follows at once."""
    return [
        recomputed(g.equations, remat[g.index])
        if g.activations_out or not backward_follows(schedule[g.mesh], g.index)
        else []
        for g in graphs
    ]


def _memory(
    graphs: Sequence[StageGraph],
    outline: Outline,
    schedule: Tasks,
    loss: Loss,
    outer: OuterProgram,
    laid: Sequence[Layout],
    known: Known,
) -> tuple[list[int], dict[int, Footprint]]:
    """The peak on a device of each mesh, and what each stage needs."""
    peaks, footprints = [], {}
    for mesh in range(len(outline.submeshes)):
        own = {g: outline.remat[g.index] for g in graphs if g.mesh == mesh}
        most, of_stages = mesh_memory(own, loss, outer, schedule[mesh], laid[mesh], known)
        peaks.append(most)
        footprints.update(of_stages)
    return peaks, footprints


def _described(
    draft: Plan,
    step: TracedStep,
    loss: Loss,
    graphs: Sequence[StageGraph],
    outer: OuterProgram,
    laid: Sequence[Layout],
    outline: Outline,
    memory: tuple[Sequence[int], Mapping[int, Footprint]],
    again: Sequence[Sequence[Equation]],
    measured: MeasuredLayers | None,
) -> list[StagePlan]:
    """The stages with their predicted times and memory, which `_memory` has found."""
    cluster = ClusterShape(**draft.cluster)
    of_mesh, footprints = memory
    split = SCHEDULES[outline.schedule].splits_backward
    timed: dict[object, StageSeconds] = {}  # of stages that are the same program, cut alike
    stages = []
    for graph, stage in zip(graphs, draft.stages, strict=True):
        layout, links = laid[graph.mesh], links_of(outline.submeshes[graph.mesh], cluster)
        data, model = stage.logical_mesh
        slices = outline.num_micro_batches * data
        timing = measured.stage(stage.layers, slices, model) if measured else None
        as_one = Kind.FORWARD not in footprints[graph.index].left
        key = (
            graph.structure,
            tuple(layout.operand(i) for i in graph.operands),
            tuple(layout.activation(v) for v in graph.activations_in),
            tuple(layout.is_gathered(i) for i in graph.operands),
            (*layout.sizes.items(), links, len(again[graph.index]), stage.remat, timing),
            as_one,
        )
        if key not in timed:
            timed[key] = stage_seconds(
                graph, loss, layout, cluster, links, again[graph.index], as_one, split, timing
            )
        beside = [other.num_parameters for other in draft.stages if other.devices == stage.devices]
        share = stage.num_parameters / sum(beside) if any(beside) else 1 / len(beside)
        once, at_end = update_seconds(graph, loss, outer, layout, cluster, links, share)
        stages.append(
            dataclasses.replace(
                stage,
                **vars(timed[key]) | {"collectives": timed[key].collectives + at_end},
                update_seconds=once,
                memory_bytes=of_mesh[graph.mesh],
                at_once=measured.at_once(stage.layers, cluster) if measured else None,
            )
        )
    return stages


def _transfers(
    graphs: Sequence[StageGraph], outer: OuterProgram, slicing: Slicing, trained: bool
) -> tuple[Transfer, ...]:
    """What crosses between meshes: activations go to a mesh once, a gradient comes back from each
    stage that read them, and the rest of the step sends from first stage to first stage."""
    every: dict[tuple[int, int], int] = {}
    once: dict[tuple[int, int], int] = {}
    for graph in graphs:
        for v, consumers in zip(graph.activations_out, graph.consumers, strict=True):
            size = nbytes(v.aval) * slicing.replicas
            abroad = [to for to in consumers if graphs[to].mesh != graph.mesh]
            for to in {graphs[to].mesh: to for to in reversed(abroad)}.values():
                every[graph.index, to] = every.get((graph.index, to), 0) + size
            for to in abroad:
                if trained and v in graph.active:
                    every[to, graph.index] = every.get((to, graph.index), 0) + size
    first = {g.mesh: g.index for g in reversed(graphs)}
    sends = [*outer.argument_sends, *outer.part_sends]
    for segment in (*outer.before, *outer.after):
        sends += [(v, segment.mesh, to) for v, to in segment.sends]
    for v, src, dst in sends:
        link = first[src], first[dst]
        once[link] = once.get(link, 0) + nbytes(v.aval)
    return tuple(
        Transfer(*link, every.get(link, 0), once.get(link, 0)) for link in sorted({*every, *once})
    )
