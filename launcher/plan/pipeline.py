"""The timeline of a step, simulated from the predicted seconds of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.partition.reduction import Reduction
from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.links import once_seconds, transfer_ways
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
        predicted_step_seconds: seconds of the simulated timeline, of the longest update, and of the
            transfers once a step.
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

    if cluster.effective_parallelism is None or not cluster.shares_machine:
        return simulate(plan.tasks(), duration, transfer_ways(plan))
    shares = [stage.effective_parallelism or cluster.effective_parallelism for stage in plan.stages]
    machine = Shared(cluster.num_devices, [min(n, cluster.num_devices) for n in shares])
    devices_of = [len(mesh) for mesh in plan.meshes]
    return simulate_shared(plan.tasks(), duration, transfer_ways(plan), devices_of, machine)


def measured_bubble(plan: Pipeline | Plan, seconds: Mapping[Task, float]) -> float:
    """Return the bubble of the plan's schedule if its tasks take these seconds, 0 … 1."""
    measured = simulate(plan.tasks(), lambda task: seconds.get(task, 0.0))
    return bubble_fraction(measured, len(plan.meshes))


def estimated(pipeline: Pipeline) -> Estimate:
    """Return the pipeline with the predictions that its timeline makes."""
    expected = timeline(pipeline)
    once: dict[tuple[int, ...], float] = {}
    for stage in pipeline.stages:
        once[stage.devices] = once.get(stage.devices, 0.0) + stage.update_seconds
    return Estimate(
        **vars(pipeline),
        predicted_step_seconds=step_seconds(expected) + max(once.values()) + once_seconds(pipeline),
        predicted_bubble_fraction=bubble_fraction(expected, len(pipeline.meshes)),
    )
