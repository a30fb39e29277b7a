"""The timeline of a step, simulated from the predicted seconds of its stages, and its links.

A host sends by one link and receives by another, whatever its devices send and receive. Inside a
host each mesh has a link in either direction. Pure.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.hardware import ClusterShape
from launcher.partition import Reduction
from launcher.plan.cost import formulas
from launcher.plan.plan import Plan
from launcher.plan.stage_plan import NO_RINGS, RingSeconds, Staged, StagePlan, Transfer
from launcher.schedule import (
    Kind,
    Route,
    Routes,
    Shared,
    Task,
    TimedTask,
    bubble_fraction,
    simulate,
    simulate_shared,
    step_seconds,
)


def transfer_routes(plan: Staged) -> Routes:
    """Return how a microbatch gets from stage to stage."""
    found = _by_transfer(plan, lambda one: one.bytes_per_microbatch)
    return {(one.src_stage, one.dst_stage): way for one, way in found}


def microbatch_transfer_seconds(plan: Staged) -> dict[tuple[int, int], float]:
    """Return the seconds of a microbatch's transfer, by (source, destination) stage."""
    return {pair: way.seconds + way.latency for pair, way in transfer_routes(plan).items()}


def once_seconds(plan: Staged) -> float:
    """Return the seconds of the transfers that are made once a step.

    They are those of what several stages share, such as a tied embedding and its gradient. What
    crosses different links does so at the same time.
    """
    busy: dict[str, float] = {}
    for _, way in _by_transfer(plan, lambda one: one.bytes_per_step):
        _add(busy, way.links, way.seconds + way.latency)
    return max(busy.values(), default=0.0)


def longest_update(plan: Staged) -> float:
    """Return the seconds of the sums of gradients and of the update, once all passes are over.

    They are those of the mesh that takes longest or, if that is more, of the sums that cross one
    link, which wait for one another.
    """
    of_mesh: dict[tuple[int, ...], float] = {}
    for stage in plan.stages:
        of_mesh[stage.devices] = of_mesh.get(stage.devices, 0.0) + stage.update_seconds
    busy: dict[str, float] = {}
    for link, seconds in _by_ring(plan, _not_hidden):
        _add(busy, [link], seconds)
    return max([*of_mesh.values(), *busy.values()])


def _not_hidden(stage: StagePlan) -> RingSeconds:
    rings = stage.once_rings  # the sums are along data
    return RingSeconds(rings.model, max(0.0, rings.data - stage.hidden_seconds))


def link_seconds(plan: Staged) -> dict[str, float]:
    """Return for how many seconds of a step each link is occupied, by its name."""
    busy: dict[str, float] = {}
    for _, way in _by_transfer(plan, lambda one: one.bytes_per_microbatch):
        _add(busy, way.links, way.seconds * plan.num_micro_batches)
    for _, way in _by_transfer(plan, lambda one: one.bytes_per_step):
        _add(busy, way.links, way.seconds)
    for link, seconds in _by_ring(plan, lambda stage: stage.pass_rings):
        _add(busy, [link], seconds * plan.num_micro_batches)
    for link, seconds in _by_ring(plan, lambda stage: stage.once_rings):
        _add(busy, [link], seconds)
    return busy


def _add(busy: dict[str, float], links: Iterable[str], seconds: float) -> None:
    busy.update((link, busy.get(link, 0.0) + seconds) for link in links)


def _by_ring(
    plan: Staged, rings_of: Callable[[StagePlan], RingSeconds]
) -> Iterator[tuple[str, float]]:
    """Yield the links that the stages' collectives occupy, with the seconds.

    Devices that share a machine have no links: what moves the bytes is what computes.
    """
    cluster, mesh_of = ClusterShape(**plan.cluster), plan.mesh_of
    for stage, mesh in zip(plan.stages, mesh_of, strict=True):
        rings = rings_of(stage)
        if cluster.shares_machine or rings == NO_RINGS:
            continue
        hosts = tuple(map(cluster.host_of, stage.devices))
        every = formulas.ring_hops(hosts, stage.logical_mesh[1])
        for seconds, hops in zip((rings.model, rings.data), every, strict=True):
            if not seconds:
                continue
            # A ring has the rate of the link that it shares with most others.
            most = max(hops.values(), default=0)
            ends = {f"host {host}": n / most for host, n in hops.items()}
            for end, share in (ends or {f"mesh {mesh}": 1.0}).items():
                yield f"from {end}", share * seconds
                yield f"to {end}", share * seconds


def _by_transfer(
    plan: Staged, size_of: Callable[[Transfer], int]
) -> Iterator[tuple[Transfer, Route]]:
    cluster, mesh_of = ClusterShape(**plan.cluster), plan.mesh_of
    for one in plan.transfers:
        size, ends = size_of(one), (one.src_stage, one.dst_stage)
        if not size:
            continue
        src, dst = (plan.stages[s] for s in ends)
        is_local = src.hosts == dst.hosts
        seconds = formulas.transfer_seconds(
            size,
            parts=(src.logical_mesh[0], dst.logical_mesh[0]),
            hosts=(len(src.hosts), len(dst.hosts)),
            is_local=is_local,
            cluster=cluster,
        )
        if is_local:
            out, into = ([f"mesh {mesh_of[s]}"] for s in ends)
        else:
            out, into = ([f"host {host}" for host in stage.hosts] for stage in (src, dst))
        links = *(f"from {end}" for end in out), *(f"to {end}" for end in into)
        yield one, Route(links, float(seconds) - cluster.latency, cluster.latency)


@dataclass(frozen=True)
class Pipeline(Staged):
    """What a timeline is simulated from: a plan without predictions for the whole step."""

    method: str
    schedule: str
    num_micro_batches: int
    stages: tuple[StagePlan, ...]
    transfers: tuple[Transfer, ...]
    cluster: dict[str, Any]
    reduction: Reduction


@dataclass(frozen=True)
class Estimate(Pipeline):
    """A pipeline and its predicted step.

    Attributes:
        predicted_step_seconds: see `whole_step_seconds`.
        predicted_within: see `half_width`.
        predicted_bubble_fraction: idle share of the pipeline, 0 … 1.
    """

    predicted_step_seconds: float
    predicted_within: float
    predicted_bubble_fraction: float


def timeline(plan: Pipeline | Plan) -> list[TimedTask]:
    """Return the timeline of the step's pipeline as the planner expects it."""
    cluster = ClusterShape(**plan.cluster)

    seconds = [
        {
            Kind.FORWARD: stage.forward_seconds,
            Kind.BACKWARD: stage.backward_seconds,
            Kind.BACKWARD_INPUT: stage.backward_seconds - stage.backward_weight_seconds,
            Kind.BACKWARD_WEIGHT: stage.backward_weight_seconds,
        }
        for stage in plan.stages
    ]

    def duration(task: Task) -> float:
        return seconds[task.stage][task.kind]

    if not cluster.shares_machine:
        return simulate(plan.tasks(), duration, transfer_routes(plan))
    machine = _machine(cluster, [stage.effective_parallelism for stage in plan.stages])
    devices_of = [len(mesh) for mesh in plan.meshes]
    return simulate_shared(plan.tasks(), duration, transfer_routes(plan), devices_of, machine)


def measured_bubble(plan: Pipeline | Plan, seconds: Mapping[Task, float]) -> float:
    """Return the bubble of the plan's schedule if its tasks take these seconds, 0 … 1."""
    measured = simulate(plan.tasks(), lambda task: seconds.get(task, 0.0))
    return bubble_fraction(measured, len(plan.meshes))


def _machine(cluster: ClusterShape, shares: Sequence[float | None]) -> Shared:
    """Return the machine that runs tasks of such effective parallelism; None: the cluster's."""
    others, count = cluster.effective_parallelism or 1.0, cluster.num_devices
    return Shared(count, [min(share or others, count) for share in shares])


def _with_updates_at_once(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with what its updates take on devices that share a machine.

    They run at the same time, faster where devices are idle, and wait for the start of their
    programs: what starts them is what computes. Devices of their own have been sent the update
    while they were at work, and are as fast whatever others do.
    """
    cluster = ClusterShape(**pipeline.cluster)
    if not cluster.shares_machine:
        return pipeline
    faster = _machine(cluster, [None]).speed(0, sum(map(len, pipeline.meshes)))
    beside = Counter(pipeline.mesh_of)
    stages = []
    for stage, mesh in zip(pipeline.stages, pipeline.mesh_of, strict=True):
        start = cluster.dispatch_overhead / beside[mesh] if stage.update_seconds else 0.0
        seconds = (stage.update_seconds + start) / faster
        stages.append(dataclasses.replace(stage, update_seconds=seconds))
    return dataclasses.replace(pipeline, stages=tuple(stages))


def whole_step_seconds(plan: Pipeline | Plan, expected: list[TimedTask]) -> float:
    """Return the predicted seconds of a step, given its timeline.

    They are those of the timeline, of the longest update, and of the transfers once a step; or
    those in which a link is occupied, if they are more.
    """
    seconds = step_seconds(expected) + longest_update(plan) + once_seconds(plan)
    return max([seconds, *link_seconds(plan).values()])


# How far off predictions are: for A100 and H100, by four fifths of the runs of each kind in
# `tests/benchmarks/published.json`; the other two are taken.
_ALONG_DATA, _CUT, _OTHER_KIND, _CPU = 0.06, 0.14, 0.1, 0.25
_RAN = re.compile(r"\b[AH]100\b")  # also in "NVIDIA H100 80GB HBM3", as JAX names it


def half_width(pipeline: Pipeline) -> float:
    """Return how far off the predicted step is taken to be: it is an 80 % interval's half width.

    In 8 of 10 cases a step takes between the prediction / (1 + this) and the prediction
    * (1 + this). That is more where a model's layers are cut, or are on several submeshes, and for
    GPUs that no known run was on.
    """
    kind = str(pipeline.cluster["device_kind"])
    if kind == "cpu":
        return _CPU
    cut = len(pipeline.meshes) > 1 or any(stage.logical_mesh[1] > 1 for stage in pipeline.stages)
    return (_CUT if cut else _ALONG_DATA) + (0.0 if _RAN.search(kind) else _OTHER_KIND)


def estimated(pipeline: Pipeline) -> Estimate:
    """Return the pipeline with the predictions that its timeline makes."""
    pipeline = _with_updates_at_once(pipeline)
    expected = timeline(pipeline)
    return Estimate(
        **vars(pipeline),
        predicted_step_seconds=whole_step_seconds(pipeline, expected),
        predicted_within=half_width(pipeline),
        predicted_bubble_fraction=bubble_fraction(expected, len(pipeline.meshes)),
    )
