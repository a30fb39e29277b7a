"""The parallel methods as values: what a user writes in Python, or names in the settings.

A method is a frozen dataclass that turns a traced step and a cluster's shape into a `Plan`; it
holds no device and no result.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

from launcher.hardware import ClusterShape
from launcher.partition import Assignment, PlanError, remat_of_stages
from launcher.plan.auto_plan import auto_plans
from launcher.plan.followers.forward import make_forward_plan
from launcher.plan.followers.further import lead_of
from launcher.plan.followers.update_plan import make_update_plan
from launcher.plan.one_stage import (
    DataParallel,
    ParameterServer,
    Reducing,
    ShardParallel,
    Zero2Parallel,
    Zero3Parallel,
    planned,
)
from launcher.plan.options import (
    AutoLayerOption,
    AutoStageOption,
    ManualLayerOption,
    ManualStageOption,
    UniformStageOption,
    check_product,
    checked_micro_batches,
    layer_option_of,
    stage_option_of,
)
from launcher.plan.plan import Plan
from launcher.schedule import DEFAULT_SCHEDULE, training_schedules
from launcher.trace import TracedStep

__all__ = [
    "AutoLayerOption",
    "AutoStageOption",
    "DataParallel",
    "Follow",
    "ManualLayerOption",
    "ManualStageOption",
    "Method",
    "ParameterServer",
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


@dataclass(frozen=True)
class ThreeDParallel(Reducing):
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
        return _pipeline(self, step.opened, cluster, "three_d", option)


@dataclass(frozen=True)
class PipeshardParallel(Reducing):
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
        step = layer_option_of(self.layer_option).layered(step.opened)
        option = stage_option_of(self.stage_option)
        if isinstance(option, AutoStageOption):
            return auto_plans(
                step,
                cluster,
                self.num_micro_batches,
                self.schedule,
                self.remat,
                option.cost,
                reduction=self.reduction,
            )[0]
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
        step = step.planned_as(self.found.fingerprint)
        if self.found.fingerprint == step.fingerprint:
            self.found.validate(step)
        return dataclasses.replace(self.found, workers=())


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
    return planned(step, assignment, cluster)


@dataclass(frozen=True)
class Follow:
    """Evaluation where a train step keeps its parameters: on the stages of its plan `like`.

    A function without a loss, which uses gradients, runs where the update of the train step does.

    Attributes:
        like: the plan of the train step.
        step: the train step; only a function without a loss needs it.
    """

    like: Plan
    step: TracedStep | None = None

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`."""
        del cluster
        if step.traces is not None:
            return make_forward_plan(step, self.like)
        if self.step is None:
            raise PlanError(
                "a function that takes no gradient follows a function, not a plan: name the "
                "parallelized train step, launcher.parallelize(apply, method=step)"
            )
        return make_update_plan(step, self.step, self.like)
