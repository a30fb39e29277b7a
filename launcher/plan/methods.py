"""The parallel methods as values: what a user writes in Python, or names in the settings.

A method is a frozen dataclass that turns a traced step and a cluster's shape into a `Plan`; it
holds no device and no result. `auto_plans` searches for one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Protocol

from launcher.hardware import ClusterShape
from launcher.partition import (
    DEFAULT_REDUCTION,
    Assignment,
    PlanError,
    Reduction,
    Submesh,
    remat_of_stages,
)
from launcher.plan.followers import make_forward_plan, make_update_plan
from launcher.plan.further import build_parts, checked_fit, lead_of, with_further
from launcher.plan.inter_op.problem import Constraints
from launcher.plan.inter_op.select import search
from launcher.plan.inter_op.submeshes import model_sizes
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
from launcher.plan.profile.measure_layers import MeasuredLayers, measure_layers
from launcher.schedule import DEFAULT_SCHEDULE, training_schedules
from launcher.trace import BatchError, JoinedError, TracedStep

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

_ONE_WORKER = "one worker: nothing to sum through parameter servers, so none run, as parallel=data"


@dataclass(frozen=True, kw_only=True)
class Reducing:
    """What every method obeys that makes replicas.

    Attributes:
        bucket_bytes: the most bytes of gradients that one collective sums over the replicas, while
            the backward pass continues; a larger gradient is summed alone. 0: each gradient alone.
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


class _OneStage(Reducing):
    """One stage on all devices."""

    method: ClassVar[str]
    zero: ClassVar[int] = 0
    num_micro_batches: int
    remat: str

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`."""
        step = self._with_layers(step)
        return planned(step, self._assignment(step, cluster, self.reduction), cluster)

    def _with_layers(self, step: TracedStep) -> TracedStep:
        """Return a step whose scans are open, if a layer at a time is to be recomputed."""
        return step if remat_of_stages(self.remat, 1) == ("none",) else step.opened

    def _logical_mesh(self, cluster: ClusterShape) -> tuple[int, int]:
        return cluster.num_devices, 1

    def _assignment(
        self, step: TracedStep, cluster: ClusterShape, reduction: Reduction
    ) -> Assignment:
        shape = self._logical_mesh(cluster)
        return Assignment(
            method=self.method,
            layers=(tuple(range(lead_of(step).loss(1).num_layers)),),
            submeshes=(Submesh(tuple(range(cluster.num_devices)), shape),),
            mesh_of=(0,),
            num_micro_batches=checked_micro_batches(self.num_micro_batches),
            schedule=DEFAULT_SCHEDULE,
            remat=remat_of_stages(self.remat, 1),
            zero=(self.zero,),
            reduction=reduction,
        )


@dataclass(frozen=True)
class DataParallel(_OneStage):
    """Data parallelism: one stage on all devices.

    Each device holds all parameters and its share of the batch. Gradients are all-reduced once a
    step, whatever the number of microbatches.
    """

    method = "data"
    num_micro_batches: int = 1
    remat: str = "none"


@dataclass(frozen=True)
class ParameterServer(DataParallel):
    """Data parallelism whose gradients are summed by parameter servers, instead of collectives.

    A worker, one a host, sums the gradients of its own devices and gives them to the servers, which
    add those of all workers in the order of their numbers. The optimizer runs in the workers. On
    one host there is nothing for servers to sum: the plan is that of `DataParallel`.

    Attributes:
        servers: number of servers; None: one a host.
    """

    method = "parameter_server"
    servers: int | None = None

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`.

        Raises:
            PlanError: as there, or the loss joins examples that different workers hold.
        """
        if self.servers is not None and self.servers < 1:
            raise PlanError(f"servers={self.servers} must be at least 1, or null for one a host")
        workers = cluster.hosts
        if workers == 1:
            plan = super().plan(step, cluster)
            return dataclasses.replace(plan, notes=(_ONE_WORKER, *plan.notes))
        servers = self.servers or workers
        by = dataclasses.replace(self.reduction, workers=workers, servers=servers).checked()
        step = self._with_layers(step)
        try:
            return build_parts(step, self._assignment(step, cluster, by), cluster)
        except JoinedError as error:
            raise PlanError(
                f"parameter servers cannot join what different workers hold, and {error.cause}; "
                "use parallel=data, launcher.DataParallel() in Python, whose devices can share the "
                "whole batch"
            ) from error


@dataclass(frozen=True)
class Zero2Parallel(DataParallel):
    """Data parallelism with a sharded optimizer state and sharded gradients (ZeRO-2).

    Gradients are sharded once they are summed: by a reduce-scatter, once a step (Rajbhandari et
    al., arXiv 1910.02054).
    """

    method, zero = "zero2", 2


@dataclass(frozen=True)
class Zero3Parallel(DataParallel):
    """Data parallelism as `Zero2Parallel`, with sharded parameters, too (ZeRO-3).

    Each pass over a microbatch gathers the parameters and scatters their gradients, so that no
    device ever keeps either whole.
    """

    method, zero = "zero3", 3


@dataclass(frozen=True)
class ShardParallel(_OneStage):
    """One stage on all devices, which share the batch (data) and each matrix product (model).

    Attributes:
        logical_mesh_shape: `(data, model)`; None: all devices in `model`.
    """

    method = "shard"
    num_micro_batches: int = 1
    logical_mesh_shape: tuple[int, int] | None = None
    remat: str = "none"

    def _logical_mesh(self, cluster: ClusterShape) -> tuple[int, int]:
        given = self.logical_mesh_shape or (1, cluster.num_devices)
        shape = pair("logical_mesh_shape", given)
        check_product("logical_mesh_shape", shape, cluster)
        return shape


def planned(step: TracedStep, assignment: Assignment, cluster: ClusterShape) -> Plan:
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


def auto_plans(  # noqa: PLR0913 (the search's settings)
    step: TracedStep,
    cluster: ClusterShape,
    num_micro_batches: int | None,
    schedule: str,
    remat: str | Sequence[str],
    cost: str = "measured",
    progress: Callable[[float], None] = lambda share: None,
    num_stages: int | None = None,
    reduction: Reduction = DEFAULT_REDUCTION,
    how_many: Callable[[Plan], int] = lambda best: 1,
) -> list[Plan]:
    """Return the best plan that the search finds and, if asked for, others that are worth trying.

    Args:
        step: the traced train step, cut into layers.
        cluster: the devices to plan for.
        num_micro_batches: number of microbatches; None: searched for.
        schedule: name of a schedule, or "auto".
        remat: name of a rematerialisation policy, or "auto".
        cost: see `AutoStageOption`.
        progress: called with the share that is done, 0 … 1.
        num_stages: number of stages; None: as many as are best.
        reduction: how gradients are summed over the replicas.
        how_many: returns how many plans to return, given the best.

    Raises:
        PlanError: the search does not know the schedule, policy or cost, or nothing fits.
    """
    if cost not in ("measured", "model", "profile"):
        raise PlanError(f'cost={cost!r} is not "measured", "model" or "profile"')
    searched = training_schedules(interleaves=False)
    if schedule not in ("auto", *searched):
        raise PlanError(
            f"parallel.schedule={schedule} is not searched for; give auto, "
            f"{', '.join(searched[:-1])} or {searched[-1]}, or use parallel=manual"
        )
    if remat != "auto":
        remat = remat_of_stages(remat, 1)[0]
    wanted = Constraints(
        num_micro_batches=num_micro_batches and checked_micro_batches(num_micro_batches),
        schedule=None if schedule == "auto" else schedule,
        remat=None if remat == "auto" else str(remat),
        num_stages=num_stages,
        reduction=reduction,
    )
    measured = None
    if cost == "profile":
        measured = measure_layers(
            lead_of(step),
            cluster,
            model_sizes(cluster),
            wanted.num_micro_batches,
            lambda share: progress(0.9 * share),
        )
    done = 0.9 if measured else 0.0
    found = search(
        step,
        cluster,
        wanted,
        lambda share: progress(done + (1 - done) * share),
        measured,
        how_many,
    )
    best = checked_fit(with_further(step, *found[0], measured))
    return [best, *_whole(step, found[1:], measured)]


def _whole(
    step: TracedStep, found: Sequence[tuple[Plan, Assignment]], measured: MeasuredLayers | None
) -> Iterator[Plan]:
    """Yield the plans of a whole step, but for those that its other losses cannot follow."""
    for plan, assignment in found:
        with suppress(PlanError, BatchError):
            yield checked_fit(with_further(step, plan, assignment, measured))


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
