"""Building a plan from a method's assignment: shardings, transfers, memory, predictions, notes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from launcher.base import parse_remat
from launcher.hardware import ClusterShape, has_bf16
from launcher.partition import (
    DATA,
    MODEL,
    ROWS,
    Assignment,
    Bucket,
    Exchanged,
    GradientSync,
    Known,
    Layout,
    NamedDims,
    PartitionedStep,
    Pieces,
    Recomputed,
    RematSegment,
    Spec,
    StageGraph,
    exchanges,
    gradient_order,
    in_pieces,
    keeps,
    operand_types,
    outer_dims,
    own_layers,
    partition,
    recomputed,
    segments,
    shared_out,
)
from launcher.plan.cost.collectives import Collective
from launcher.plan.cost.mesh_memory import UpdateMemory, mesh_memory, summed_how, waiting_bytes
from launcher.plan.cost.stage_memory import Footprint, footprint
from launcher.plan.cost.stage_seconds import (
    StageLoads,
    StageSeconds,
    exchange_seconds,
    links_of,
    stage_loads,
    stage_seconds,
    stage_update_seconds,
)
from launcher.plan.intra_op import StageShardings
from launcher.plan.pipeline import Pipeline, estimated
from launcher.plan.plan import Plan
from launcher.plan.profile.measure_layers import MeasuredLayers
from launcher.plan.stage_plan import (
    ServerExchange,
    StagePlan,
    SummedTogether,
    Transfer,
    transfers_by_link,
)
from launcher.schedule import SCHEDULES, Kind
from launcher.trace import (
    OWN_KERNELS,
    BatchError,
    Loss,
    TracedStep,
    leaf_names,
    matmul_flops,
    nbytes,
    no_gradient_note,
    source_line,
)

# of every submesh, by its devices: the specs of arguments by their names
KeptShardings = Mapping[tuple[int, ...], Mapping[str, Spec]]


def build_plan(
    step: TracedStep,
    assignment: Assignment,
    cluster: ClusterShape,
    measured: MeasuredLayers | None = None,
) -> Plan:
    """Return the plan of one assignment; see `PlanBuilder.build`."""
    return PlanBuilder(step, cluster, measured).build(assignment)


Places = tuple[tuple[int, ...], ...]  # of each program, those of operands among a stage's


class _Programs(NamedTuple):
    """What a stage's task programs need, and how its gradients are summed.

    Attributes:
        memory: their memory.
        sums: the sums of the gradients.
        gathered: what each of them gathers, with the types (`operand_types`).
    """

    memory: Footprint
    sums: GradientSync
    gathered: Sequence[Mapping[int, str]]


class PlanLoads(NamedTuple):
    """What the stages of a plan do, whatever the rates of the devices.

    Attributes:
        cut: the partitioned step.
        again: what each stage's backward pass recomputes.
        crossing: what workers exchange through parameter servers.
        stages: what each stage does for a microbatch.
        peaks: the peak memory of each mesh, in bytes.
    """

    cut: PartitionedStep
    again: Sequence[Recomputed]
    crossing: tuple[ServerExchange, ...]
    stages: tuple[StageLoads, ...]
    peaks: Sequence[int]


class PlanBuilder:
    """Builder of plans of one step on one cluster.

    What several plans have in common, the memory of stages that are the same program sharded alike,
    is computed once.

    Args:
        step: the traced step.
        cluster: the devices to plan for.
        measured: the layers' measured seconds, instead of the cost model's.
        beside: the parts of the step, all of which have to be cut into the same slices.
    """

    def __init__(
        self,
        step: TracedStep,
        cluster: ClusterShape,
        measured: MeasuredLayers | None = None,
        beside: Sequence[TracedStep] = (),
    ) -> None:
        self._step = step
        self._cluster = measured.shape(cluster) if measured else cluster
        self._measured = measured
        self._beside = beside
        self._differentiated: Known = {}
        self._known: dict[object, tuple[Footprint, Places, Sequence[Mapping[int, str]]]] = {}

    def build(self, assignment: Assignment, kept: KeptShardings | None = None) -> Plan:
        """Return the plan of an assignment; shardings that it lacks are chosen.

        Args:
            assignment: the assignment.
            kept: the specs that arguments have by the plan of another loss of the step, by the
                devices of the submesh. They are not chosen again.

        Raises:
            PlanError: its schedule cannot run its stages, a sharding that was given does not fit,
                or a layer could not be measured.
            BatchError: the batch does not divide into microbatches and replicas.
        """
        step, cluster, measured = self._step, self._cluster, self._measured
        does = self.loads(assignment, kept)
        cut = does.cut
        trained, num_slices = bool(cut.loss.wrt), cut.slicing.num_slices
        flops = sum(matmul_flops(g.equations) for g in cut.stages) * num_slices
        flops *= 3 if trained else 1
        flops_again = sum(of.matmul_flops for of in does.again) * num_slices
        with_remat = flops + (flops_again if trained else 0.0)
        estimate = estimated(self._pipeline(does, cluster))
        seconds = estimate.predicted_step_seconds
        rate = 1.0 / seconds / estimate.num_devices / 1e12
        return Plan(
            **vars(estimate),
            batch_size=step.batch_size,
            num_parameters=sum(stage.num_parameters for stage in estimate.stages),
            flops_per_step=flops,
            predicted_samples_per_second=step.batch_size / seconds,
            predicted_tflops_per_device=flops * rate,
            predicted_tflops_per_device_with_remat=with_remat * rate,
            fingerprint=step.fingerprint,
            notes=(*plan_notes(cut, self._no_gradient), *_without_bf16(cut, cluster)),
            loss=cut.loss.meaning,
            layer_ends=step.layer_ends,
            profiled=measured.account() if measured else (),
            exchanges=does.crossing,
            jax_version=jax.__version__,
        )

    def loads(self, assignment: Assignment, kept: KeptShardings | None = None) -> PlanLoads:
        """Return what the stages of an assignment do, and raise, as `build` does."""
        for part in self._beside:
            part.loss(assignment.slicing.num_slices)
        chosen = StageShardings(self._step, assignment, self._cluster, self.outer_dims)

        def choose(loss: Loss, graph: StageGraph) -> dict[str, Spec]:
            devices = assignment.submeshes[graph.mesh].devices
            return {**chosen(loss, graph), **(kept or {}).get(devices, {})}

        cut = partition(self._step, assignment, choose, self.outer_dims)
        again = [recomputed(g.layers, assignment.remat[g.index]) for g in cut.stages]
        sums = [self._programs(cut, graph.index).sums for graph in cut.stages]
        crossing = server_exchanges(cut, [bucket for of in sums for bucket in of.once])
        stages = self._stage_loads(cut, again)
        return PlanLoads(cut, again, crossing, stages, self._peaks(in_pieces(cut)))

    def _pipeline(self, does: PlanLoads, cluster: ClusterShape) -> Pipeline:
        """Return what the stages take on devices of these rates."""
        assignment = does.cut.assignment
        return Pipeline(
            method=assignment.method,
            schedule=assignment.schedule,
            num_micro_batches=assignment.num_micro_batches,
            stages=self._stages(does, cluster),
            transfers=transfers_of(does.cut),
            cluster=vars(cluster).copy(),
            reduction=assignment.reduction,
        )

    @functools.cached_property
    def _no_gradient(self) -> str | None:
        return no_gradient_note(self._step)

    @functools.cached_property
    def _update_memory(self) -> UpdateMemory:
        return UpdateMemory(self._step, self._cluster.is_gpu)

    @functools.cached_property
    def outer_dims(self) -> NamedDims:
        """The named dimensions outside of the loss."""
        return outer_dims(self._step)

    def _programs(self, cut: PartitionedStep, stage: int) -> _Programs:
        """Return what a stage's task programs need, and how its gradients are summed."""
        layout, operands = cut.layout(stage), cut.stages[stage].operands
        how = [(layout.is_gathered(i), layout.is_scattered(i)) for i in operands]
        key = cut.likeness(stage), cut.slicing.micro_batches == 1, tuple(how)
        if key not in self._known:
            of, inside = cut.programs(stage, self._differentiated)
            place = {i: k for k, i in enumerate(operands)}
            orders = [gradient_order(one) for one in of.programs.values()]
            places = tuple(tuple(place[i] for i in order) for order in orders)
            on_gpu = self._cluster.is_gpu
            summed = summed_how(cut, stage, cut.gradient_sync(stage, orders), on_gpu)
            every = [operand_types(one).items() for one in of.programs.values()]
            read = [{place[i]: dtype for i, dtype in types} for types in every]
            self._known[key] = footprint(of, inside, on_gpu, summed), places, read
        memory, places, reads = self._known[key]
        orders = [tuple(operands[k] for k in order) for order in places]
        gathered = [
            {operands[k]: dtype for k, dtype in own.items() if layout.is_gathered(operands[k])}
            for own in reads
        ]
        return _Programs(memory, cut.gradient_sync(stage, orders), gathered)

    def _stages(self, does: PlanLoads, cluster: ClusterShape) -> tuple[StagePlan, ...]:
        """Return the stages with their predicted times and memory."""
        timed, counts = self._seconds(does, cluster), _num_parameters(does.cut)
        through = exchange_seconds(does.crossing, does.cut.assignment.reduction, cluster)
        return tuple(
            self._stage(does, graph, seconds, counts, through, cluster)
            for graph, seconds in zip(does.cut.stages, timed, strict=True)
        )

    def _peaks(self, pieces: Pieces) -> list[int]:
        """Return the peak memory of each mesh, whose stages run in pieces."""
        cut = pieces.cut
        programs = [self._programs(cut, graph.index) for graph in cut.stages]
        footprints = {s: own.memory for s, own in enumerate(programs)}
        waiting = waiting_bytes(footprints, cut.tasks)
        of = [own.sums for own in programs], self._update_memory, waiting, self._cluster.is_gpu
        return [mesh_memory(pieces, mesh, footprints, *of) for mesh in range(len(cut.layouts))]

    def _stage_loads(
        self, cut: PartitionedStep, again: Sequence[Recomputed]
    ) -> tuple[StageLoads, ...]:
        """Return what each stage does; stages that are the same program share it."""
        known: dict[object, StageLoads] = {}
        found = []
        for graph, repeated in zip(cut.stages, again, strict=True):
            layout, own = cut.layouts[graph.mesh], self._programs(cut, graph.index)
            gathered = tuple(layout.is_gathered(i) for i in graph.operands)
            key = cut.likeness(graph.index), gathered
            if key not in known:
                as_one = Kind.FORWARD not in own.memory.left
                sums = _sum_collectives(own.sums.every, layout)
                known[key] = stage_loads(
                    graph, cut.loss, layout, repeated, as_one, own.gathered, sums
                )
            found.append(known[key])
        return tuple(found)

    def _seconds(self, of: PlanLoads, cluster: ClusterShape) -> list[StageSeconds]:
        """Return what each stage takes; of stages that do the same only one is timed."""
        cut, split = of.cut, SCHEDULES[of.cut.assignment.schedule].splits_backward
        known: dict[object, StageSeconds] = {}
        found = []
        for graph, does in zip(cut.stages, of.stages, strict=True):
            s, own = graph.index, cut.assignment.own_submesh(graph.mesh)
            links, timing = links_of(own, cluster), self._timing(cut, graph)
            key = id(does), links, timing
            if key not in known:
                known[key] = stage_seconds(does, cluster, links, split, timing)
            seconds = known[key]
            if self._measured:
                alone = self._measured.effective_parallelism(
                    cut.assignment.layers[s], self._cluster
                )
                seconds = dataclasses.replace(seconds, effective_parallelism=alone)
            found.append(seconds)
        return found

    def _timing(self, cut: PartitionedStep, graph: StageGraph) -> tuple[float, float] | None:
        """Return the measured seconds of a stage's forward and backward pass, if they are known."""
        if self._measured is None:
            return None
        data, model = cut.assignment.submeshes[graph.mesh].logical_mesh
        layers = cut.assignment.layers[graph.index]
        return self._measured.stage(layers, cut.assignment.num_micro_batches * data, model)

    def _stage(
        self,
        does: PlanLoads,
        graph: StageGraph,
        seconds: StageSeconds,
        counts: Sequence[int],
        through_servers: float,
        cluster: ClusterShape,
    ) -> StagePlan:
        """Return one stage, given the parameters of every stage, and the seconds of exchanges."""
        s, cut, assignment = graph.index, does.cut, does.cut.assignment
        sums = self._programs(cut, s).sums
        submesh, layout = assignment.submeshes[graph.mesh], cut.layouts[graph.mesh]
        beside = [counts[other.index] for other in cut.on_mesh(graph.mesh)]
        share = counts[s] / sum(beside) if any(beside) else 1 / len(beside)
        links = links_of(assignment.own_submesh(graph.mesh), cluster)
        once = stage_update_seconds(
            graph,
            cut.loss,
            cut.update,
            layout,
            cluster,
            links,
            share,
            _sum_collectives(sums.once, layout),
            seconds.backward_seconds,
            through_servers,
        )
        return StagePlan(
            layers=assignment.layers[s],
            hosts=cluster.hosts_of(submesh.devices),
            devices=submesh.devices,
            logical_mesh=submesh.logical_mesh,
            remat=assignment.remat[s],
            own_checkpoints=own_layers(graph.layers) if cut.loss.wrt else 0,
            **vars(seconds) | vars(once) | {"collectives": seconds.collectives + once.collectives},
            buckets=_planned_buckets(sums, self._step.operand_names),
            memory_bytes=does.peaks[graph.mesh],
            num_parameters=counts[s],
            shardings=dict(assignment.shardings_of(s) or {}),
        )


def repriced(step: TracedStep, plan: Plan, measured: MeasuredLayers) -> Plan:
    """Return the same plan with predictions from measured layers.

    Raises:
        PlanError: one of its layers could not be measured.
    """
    step, cluster = step.cut_at(plan.layer_ends), ClusterShape(**plan.cluster)
    built = build_plan(step, plan.assignment, cluster, measured)
    return dataclasses.replace(built, runners_up=plan.runners_up)


def _planned_buckets(sums: GradientSync, names: Sequence[str]) -> tuple[SummedTogether, ...]:
    """Return the buckets as a plan lists them, given the names of the loss's operands."""
    return tuple(
        SummedTogether(
            when=when,
            kind=bucket.collective,
            dtype=bucket.dtype,
            tensors=tuple(names[i] for i in bucket.operands),
            bytes=bucket.nbytes,
        )
        for when, buckets in (("backward", sums.every), ("update", sums.once))
        for bucket in buckets
    )


def _sum_collectives(buckets: Sequence[Bucket], layout: Layout) -> list[Collective]:
    """Return a collective for each bucket; none on a submesh of one replica."""
    if layout.sizes[DATA] == 1:
        return []
    return [
        Collective(b.collective, DATA if b.collective == "all-reduce" else (DATA, ROWS), b.nbytes)
        for b in buckets
    ]


def _num_parameters(cut: PartitionedStep) -> list[int]:
    """Return the number of parameters of each stage.

    A parameter lives with the first stage that reads it.
    """
    owner = {i: g.index for g in reversed(cut.stages) for i in g.operands}
    wrt = cut.loss.wrt
    return [
        sum(cut.loss.invars[i].aval.size for i in wrt if owner.get(i, 0) == g.index)
        for g in cut.stages
    ]


def transfers_of(cut: PartitionedStep) -> tuple[Transfer, ...]:
    """Return what is sent between meshes.

    An activation is sent to a mesh once, and a gradient comes back from each stage that read it.
    The rest of the step is sent from the first stage of a mesh to the first stage of another.
    """
    graphs, outer, trained = cut.stages, cut.update, bool(cut.loss.wrt)
    every: dict[tuple[int, int], int] = {}
    once: dict[tuple[int, int], int] = {}
    for graph in graphs:
        for v, consumers in zip(graph.activations_out, graph.consumers, strict=True):
            size = nbytes(v.aval) * cut.slicing.replicas
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
    return transfers_by_link(every, once)


def server_exchanges(cut: PartitionedStep, once: Sequence[Bucket]) -> tuple[ServerExchange, ...]:
    """Return what workers exchange, shared out over the servers.

    Args:
        cut: the partitioned step.
        once: the buckets of gradients that are summed once a step.
    """
    found, by = exchanges(cut, once), cut.assignment.reduction
    numbers = itertools.count()
    told = [ServerExchange(_name(x, numbers), x.when, x.kind, x.dtype, x.nbytes) for x in found]
    owners = shared_out([x.whole_bytes(by.workers) for x in told], by.servers)
    pairs = zip(told, owners, strict=True)
    return tuple(dataclasses.replace(x, server=server) for x, server in pairs)


def _name(x: Exchanged, numbers: itertools.count[int]) -> str:
    """Return what crosses in words; `numbers`: those of the buckets to come."""
    if x.kind == "sum":
        return f"bucket {next(numbers)} of gradients"
    return "rows of the batch" if x.when == "before" else "results of the loss"


def plan_notes(cut: PartitionedStep, no_gradient: str | None) -> tuple[str, ...]:
    """Return notes on the plan.

    They say what is computed on the whole batch, which kernels compute, which parameters get no
    gradient, which rematerialisation saves nothing, what workers gather for it, and what every
    device of a submesh computes since no rule says how to cut it.
    """
    shared = [layout for layout in cut.layouts if layout.sizes[MODEL] * layout.sizes[ROWS] > 1]
    unknown = {
        f"{use.eqn.primitive.name} at {source_line(use.eqn)} is not cut: every device of a submesh "
        "computes it whole"
        for layout in shared[:1]
        for use in layout.loss_dims.uses
        if use.factors is None
    }
    loss = [f"loss: {cut.loss.meaning}"] if cut.loss.from_whole_batch else []
    kernels = {
        use.eqn.params["of"].note: None
        for use in cut.layouts[0].loss_dims.uses
        if use.eqn.primitive.name in OWN_KERNELS
    }
    in_vain = [no_gradient] if no_gradient else []
    return (*loss, *kernels, *in_vain, *_without_effect(cut), *_gathered(cut), *sorted(unknown))


def _without_bf16(cut: PartitionedStep, cluster: ClusterShape) -> list[str]:
    """Return that products of bf16 are computed in fp32, in words, where they are."""
    if has_bf16(cluster.compute_capability) or not any(
        any(v.aval.dtype == jnp.bfloat16 for v in use.eqn.invars)
        for layout in cut.layouts
        for use in layout.loss_dims.uses
    ):
        return []
    return [
        f"bf16: {cluster.device_kind} (compute capability {cluster.compute_capability}) computes "
        "its products in fp32, at that rate"
    ]


def _without_effect(cut: PartitionedStep) -> list[str]:
    """Return which stages' rematerialisation changes nothing, and why, in words."""
    found: dict[tuple[str, str], list[int]] = {}
    for graph in cut.stages if cut.loss.wrt else ():
        remat = cut.assignment.remat[graph.index]
        ours = [one for one in segments(graph.layers, remat) if one.policy is not None]
        if reason := _why_in_vain(graph, ours, remat, cut.goes_back_at_once(graph.index)):
            found.setdefault((remat, reason), []).append(graph.index)
    return [
        f"remat={remat} saves nothing in stage{'s' if stages[1:] else ''} "
        f"{', '.join(map(str, stages))}: {reason}"
        for (remat, reason), stages in found.items()
    ]


def _why_in_vain(
    graph: StageGraph, ours: Sequence[RematSegment], remat: str, goes_back_at_once: bool
) -> str:
    """Return why a stage's rematerialisation changes nothing; "" if it does, or if there is none.

    Args:
        graph: the stage.
        ours: what it recomputes together.
        remat: its remat string.
        goes_back_at_once: whether its backward pass directly follows its forward pass.
    """
    if parse_remat(remat).policy == "none":
        return ""
    if own_layers(graph.layers) == len(graph.layers):
        return "the model checkpoints each of its layers itself"
    every = ((one.policy, eqn) for one in ours for eqn in one.equations)
    if all(keeps(policy, eqn) for policy, eqn in every if policy):
        return "it keeps all that is computed"
    if goes_back_at_once and len(ours) == 1 and len(graph.layers) == parse_remat(remat).layers:
        return (
            "its backward pass follows at once, and computes all of it again together; mark more "
            "layers, or take fewer together"
        )
    return ""


def _gathered(cut: PartitionedStep) -> list[str]:
    """Return what workers with parameter servers gather of the batch, in words."""
    if cut.slicing.workers == 1:
        return []
    names = dict(zip(cut.step.invars, leaf_names(cut.step), strict=True))
    whole = [names[v] for v, _ in cut.update.given if v in names and v.aval.shape]
    if not whole:
        return []
    listed = ", ".join(whole)
    return [f"workers gather all examples of the batch's {listed}: the step reads them whole"]


def refused_notes(refused: Mapping[int, BatchError]) -> tuple[str, ...]:
    """Return what to say of numbers of slices of the batch that fell out of the search, if any."""
    if not refused:
        return ()
    _, error = min(refused.items())
    words = ", ".join(map(str, sorted(refused)))
    return (f"not into {words} slices (microbatches × replicas): {error}",)
