"""The timeline of a step, simulated from the predicted seconds of its stages."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.hardware import ClusterShape
from launcher.partition import Reduction
from launcher.plan.links import link_seconds, longest_update, once_seconds, transfer_routes
from launcher.plan.plan import Plan
from launcher.plan.stage_plan import Staged, StagePlan, Transfer
from launcher.schedule import (
    Kind,
    Shared,
    Task,
    TimedTask,
    bubble_fraction,
    simulate,
    simulate_shared,
    step_seconds,
)


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
        predicted_bubble_fraction: idle share of the pipeline, 0 … 1.
    """

    predicted_step_seconds: float
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


def estimated(pipeline: Pipeline) -> Estimate:
    """Return the pipeline with the predictions that its timeline makes."""
    pipeline = _with_updates_at_once(pipeline)
    expected = timeline(pipeline)
    return Estimate(
        **vars(pipeline),
        predicted_step_seconds=whole_step_seconds(pipeline, expected),
        predicted_bubble_fraction=bubble_fraction(expected, len(pipeline.meshes)),
    )
