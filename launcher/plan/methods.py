"""The parallel methods as values: what a user writes in Python, or names in the settings.

A method is a frozen dataclass that turns a traced step and a cluster's shape into a `Plan`; it
holds no device and no result.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

from launcher.partition.assignment import Assignment, Submesh
from launcher.partition.errors import PlanError
from launcher.partition.reduction import Reduction
from launcher.partition.remat import remat_of_stages
from launcher.plan.auto_plan import auto_plan
from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.follow import Follow
from launcher.plan.further import build_parts, lead_of
from launcher.plan.options import (
    AutoLayerOption,
    AutoStageOption,
    ManualLayerOption,
    ManualStageOption,
    UniformStageOption,
    check_product,
    checked_micro_batches,
    layer_option_of,
    pair,
    stage_option_of,
)
from launcher.plan.plan import Plan
from launcher.schedule import DEFAULT_SCHEDULE, training_schedules
from launcher.trace.errors import JoinedError
from launcher.trace.step import TracedStep

__all__ = [
    "AutoLayerOption",
    "AutoStageOption",
    "DataParallel",
    "Follow",
    "ManualLayerOption",
    "ManualStageOption",
    "Method",
    "PipeshardParallel",
    "Replay",
    "ShardParallel",
    "ThreeDParallel",
    "UniformStageOption",
    "Zero2Parallel",
    "Zero3Parallel",
]


class Method(Protocol):
    """Anything that makes a plan."""

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """Return the plan of `step` on `cluster`.

        Raises:
            PlanError: there is none.
        """


@dataclass(frozen=True, kw_only=True)
class _Reducing:
    """What every method obeys that makes replicas.

    Attributes:
        bucket_bytes: the most bytes of gradients that one collective sums over the replicas, while
            the backward pass goes on; a larger gradient is summed alone. 0: each gradient alone.
        reduce_dtype: "fp32": gradients cross in at least 32 bits; "bf16": in 16.
    """

    bucket_bytes: int = Reduction.bucket_bytes
    reduce_dtype: str = Reduction.dtype

    @property
    def reduction(self) -> Reduction:
        """Both of them.

        Raises:
            PlanError: one is out of range.
        """
        return Reduction(self.bucket_bytes, self.reduce_dtype).checked()


@dataclass(frozen=True)
class DataParallel(_Reducing):
    """Data parallelism: one stage on all devices.

    Each device holds all parameters and its share of the batch. Gradients are all-reduced once a
    step, whatever the number of microbatches.
    """

    num_micro_batches: int = 1
    remat: str = "none"

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`."""
        shape = cluster.num_devices, 1
        return _one_stage(self, step, cluster, "data", shape)


@dataclass(frozen=True)
class Zero2Parallel(_Reducing):
    """Data parallelism with a sharded optimizer state and sharded gradients (ZeRO-2).

    Gradients are sharded once they are summed: by a reduce-scatter, once a step (Rajbhandari et
    al., arXiv 1910.02054).
    """

    num_micro_batches: int = 1
    remat: str = "none"

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`."""
        shape = cluster.num_devices, 1
        return _one_stage(self, step, cluster, "zero2", shape, 2)


@dataclass(frozen=True)
class Zero3Parallel(_Reducing):
    """Data parallelism as `Zero2Parallel`, with sharded parameters, too (ZeRO-3).

    Each pass over a microbatch gathers the parameters and scatters their gradients, so that no
    device ever keeps either whole.
    """

    num_micro_batches: int = 1
    remat: str = "none"

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`."""
        shape = cluster.num_devices, 1
        return _one_stage(self, step, cluster, "zero3", shape, 3)


@dataclass(frozen=True)
class ShardParallel(_Reducing):
    """One stage on all devices, which share the batch (data) and each matrix product (model).

    Attributes:
        logical_mesh_shape: `(data, model)`; None: all devices in `model`.
    """

    num_micro_batches: int = 1
    logical_mesh_shape: tuple[int, int] | None = None
    remat: str = "none"

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`."""
        given = self.logical_mesh_shape or (1, cluster.num_devices)
        data, model = pair("logical_mesh_shape", given)
        check_product("logical_mesh_shape", (data, model), cluster)
        return _one_stage(self, step, cluster, "shard", (data, model))


@dataclass(frozen=True)
class ThreeDParallel(_Reducing):
    """`pipeline` stages of equal layers, each on `data` × `model` devices."""

    data: int = 1
    model: int = 1
    pipeline: int = 1
    num_micro_batches: int = 1
    schedule: str = DEFAULT_SCHEDULE
    remat: str | tuple[str, ...] = "none"

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`."""
        sizes = self.data, self.model, self.pipeline
        check_product("data × model × pipeline", sizes, cluster)
        option = UniformStageOption(self.pipeline, logical_mesh_shape=(self.data, self.model))
        return _pipeline(self, step, cluster, "three_d", option)


@dataclass(frozen=True)
class PipeshardParallel(_Reducing):
    """A pipeline of stages, each on its own share of the devices.

    With the automatic stage option `num_micro_batches` may be None, and `schedule` and `remat`
    "auto": they are searched for as well.

    Attributes:
        num_micro_batches: number of parts of the batch that follow one another through the stages.
        layer_option: where layers end: `ManualLayerOption()` or "manual", at the model's
            `mark_pipeline_boundary()` calls; `AutoLayerOption(…)` or "auto", where few bytes cross.
        stage_option: which layers and devices make a stage: `UniformStageOption(…)` or "uniform",
            `ManualStageOption(…)`, or `AutoStageOption()` or "auto", which searches for the best.
        schedule: the name of one of `launcher.schedule.SCHEDULES` that trains.
        remat: one of `partition.remat.POLICIES`, or one for each stage.
    """

    num_micro_batches: int | None = 1
    layer_option: str | ManualLayerOption | AutoLayerOption = "manual"
    stage_option: str | UniformStageOption | ManualStageOption | AutoStageOption = "uniform"
    schedule: str = DEFAULT_SCHEDULE
    remat: str | tuple[str, ...] = "none"

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`."""
        step = layer_option_of(self.layer_option).layered(step)
        option = stage_option_of(self.stage_option)
        if isinstance(option, AutoStageOption):
            return auto_plan(
                step,
                cluster,
                self.num_micro_batches,
                self.schedule,
                self.remat,
                option.cost,
                reduction=self.reduction,
            )
        if self.num_micro_batches is None:
            raise PlanError('num_micro_batches=None needs stage_option="auto", which chooses it')
        return _pipeline(self, step, cluster, "manual", option)


@dataclass(frozen=True)
class Replay:
    """A plan found before (`Plan.from_dict(json.load(open("plan.json")))`), on other workers."""

    found: Plan

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`; the runtime refuses the plan if `step` is another program."""
        del cluster
        if self.found.fingerprint == step.fingerprint:
            self.found.validate(step)
        return dataclasses.replace(self.found, workers=())


def _one_stage(
    of: DataParallel | Zero2Parallel | Zero3Parallel | ShardParallel,
    step: TracedStep,
    cluster: ClusterShape,
    method: str,
    logical_mesh: tuple[int, int],
    zero: int = 0,
) -> Plan:
    devices = tuple(range(logical_mesh[0] * logical_mesh[1]))
    assignment = Assignment(
        method=method,
        layers=(tuple(range(lead_of(step).loss(1).num_layers)),),
        submeshes=(Submesh(devices, logical_mesh),),
        mesh_of=(0,),
        num_micro_batches=checked_micro_batches(of.num_micro_batches),
        schedule=DEFAULT_SCHEDULE,
        remat=remat_of_stages(of.remat, 1),
        zero=(zero,),
        reduction=of.reduction,
    )
    return _planned(step, assignment, cluster)


def _planned(step: TracedStep, assignment: Assignment, cluster: ClusterShape) -> Plan:
    """Return the plan of an assignment; without replicas if the only microbatch cannot be cut."""
    try:
        return build_parts(step, assignment, cluster)
    except JoinedError as error:
        if assignment.num_micro_batches > 1:
            raise
        reason = error
    meshes = tuple(Submesh(s.devices, (1, len(s.devices))) for s in assignment.submeshes)
    plan = build_parts(step, dataclasses.replace(assignment, submeshes=meshes), cluster)
    note = (
        f"devices share the whole batch instead of cutting it into replicas, since {reason.cause}"
    )
    return dataclasses.replace(plan, notes=(note, *plan.notes))


def _pipeline(
    of: ThreeDParallel | PipeshardParallel,
    step: TracedStep,
    cluster: ClusterShape,
    method: str,
    option: UniformStageOption | ManualStageOption,
) -> Plan:
    count, schedule = of.num_micro_batches, of.schedule
    assert count is not None  # its method has refused it
    if schedule not in training_schedules():
        raise PlanError(
            f"parallel.schedule={schedule} is not one of {', '.join(training_schedules())}"
        )
    cut = option.cut(lead_of(step), cluster, schedule)
    assignment = Assignment(
        method=method,
        layers=cut.layers,
        submeshes=cut.submeshes,
        mesh_of=cut.mesh_of,
        num_micro_batches=checked_micro_batches(count),
        schedule=schedule,
        remat=remat_of_stages(of.remat, len(cut.layers)),
        zero=cut.zero,
        shardings=cut.shardings,
        reduction=of.reduction,
    )
    return _planned(step, assignment, cluster)
