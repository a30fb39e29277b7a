"""The timeline of a step, simulated from the predicted seconds of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.partition.reduction import Reduction
from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.cost import formulas
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
        predicted_step_seconds: seconds of the simulated timeline and of the longest update.
        predicted_bubble_fraction: idle share of the pipeline, 0 … 1.
    """

    predicted_step_seconds: float
    predicted_bubble_fraction: float


def microbatch_transfer_seconds(plan: Pipeline | Plan) -> dict[tuple[int, int], float]:
    """Return the seconds of a microbatch's transfer, by (source, destination) stage."""
    cluster = ClusterShape(**plan.cluster)
    return {
        (one.src_stage, one.dst_stage): _transfer_seconds(
            one, plan.stages[one.src_stage], plan.stages[one.dst_stage], cluster
        )
        for one in plan.transfers
    }


def _transfer_seconds(
    transfer: Transfer, src: StagePlan, dst: StagePlan, cluster: ClusterShape
) -> float:
    seconds = formulas.transfer_seconds(
        transfer.bytes_per_microbatch,
        parts=(src.logical_mesh[0], dst.logical_mesh[0]),
        hosts=(len(src.hosts), len(dst.hosts)),
        is_local=src.hosts == dst.hosts,
        cluster=cluster,
    )
    return float(seconds)


def timeline(plan: Pipeline | Plan) -> list[TimedTask]:
    """Return the timeline of the step's pipeline as the planner expects it."""
    cluster, mesh_of = ClusterShape(**plan.cluster), plan.mesh_of
    sending = microbatch_transfer_seconds(plan)

    def duration(task: Task) -> float:
        stage = plan.stages[task.stage]
        return {
            Kind.FORWARD: stage.forward_seconds,
            Kind.BACKWARD: stage.backward_seconds,
            Kind.BACKWARD_INPUT: stage.backward_seconds - stage.backward_weight_seconds,
            Kind.BACKWARD_WEIGHT: stage.backward_weight_seconds,
        }[task.kind]

    def transfer(src: int, dst: int) -> float:
        here = mesh_of[src] == mesh_of[dst]
        return 0.0 if here else sending.get((src, dst), cluster.latency)

    if cluster.effective_parallelism is None or cluster.num_devices == 1:
        return simulate(plan.tasks(), duration, transfer)
    shares = [stage.effective_parallelism or cluster.effective_parallelism for stage in plan.stages]
    machine = Shared(cluster.num_devices, [min(n, cluster.num_devices) for n in shares])
    devices_of = [len(mesh) for mesh in plan.meshes]
    return simulate_shared(plan.tasks(), duration, transfer, devices_of, machine)


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
        predicted_step_seconds=step_seconds(expected) + max(once.values()),
        predicted_bubble_fraction=bubble_fraction(expected, len(pipeline.meshes)),
    )
