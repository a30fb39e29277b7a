"""The plan: where and when a train step runs, and what that is expected to cost.

Pure data. Every parallel method returns one; the runtime executes nothing else. It is JSON on disk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.base import DamagedError
from launcher.base.reading import read
from launcher.hardware import ClusterShape, WorkerInfo
from launcher.partition import DEFAULT_REDUCTION, Assignment, PlanError, Reduction, validate
from launcher.plan.compiled_plan import CompiledPlan
from launcher.plan.stage_plan import ServerExchange, Staged, StagePlan, Transfer
from launcher.trace import BatchError, LayerEnds, TracedStep


class UnfitError(PlanError):
    """The plan needs more memory than the devices have.

    Attributes:
        exit_code: 2 where it was to be trained, 1 where only a plan was asked for, which is there.
    """

    def __init__(self, problem: str, exit_code: int = 2) -> None:
        super().__init__(problem)
        self.exit_code = exit_code


class TooLargeError(PlanError):
    """Nothing that a search finds fits the devices' memory.

    Attributes:
        assignment: the candidate that exceeds the memory least.
    """

    def __init__(
        self, message: str, assignment: Assignment, advice: Callable[[], str] = str
    ) -> None:
        """Store the message, which ends with the advice: found by searches, so only when shown."""
        super().__init__(message)
        self.assignment = assignment
        self._advice = functools.cache(advice)

    def __str__(self) -> str:
        return super().__str__() + self._advice()

    def reword(self, rewrite: Callable[[str], str]) -> None:
        """Tell the same in other words, which `rewrite` makes of these."""
        advice = self._advice
        self.args = (rewrite(super().__str__()),)
        self._advice = functools.cache(lambda: rewrite(advice()))


@dataclass(frozen=True)
class RunnerUp:
    """A plan that the search found to be worse than the best one.

    Attributes:
        plan: the plan in words.
        predicted_step_seconds: its predicted step.
        why: why it lost.
        fits: whether the devices have the memory that it needs.
    """

    plan: str
    predicted_step_seconds: float
    why: str
    fits: bool = True


@dataclass(frozen=True)
class Trial:
    """A plan that was run for some steps, to choose the fastest of several.

    Attributes:
        plan: the plan in words.
        predicted_step_seconds: its predicted step.
        measured_step_seconds: its step as it was measured; None: it failed.
        failure: why it failed, if it did.
    """

    plan: str
    predicted_step_seconds: float
    measured_step_seconds: float | None
    failure: str = ""


@dataclass(frozen=True)
class Advice:
    """Other settings and what they would bring: each was planned as the plan that it is in.

    Attributes:
        what: what they change, in words, such as "one more host".
        change: the settings to add to the command line, a word each.
        trains_otherwise: whether they change what is learned, not only how fast.
        gain: throughput, in tokens (samples, where they have none) a second, over the plan's,
            minus 1; None: of another model, or the plan itself does not fit.
        gain_per_cost: the same of the throughput of a device, which costs as much as before.
        plan: the plan in words.
        num_parameters: those of the model.
        devices: number of devices of the cluster.
        predicted_step_seconds: its predicted step.
        samples_per_second: its predicted throughput.
        tokens_per_second: the same in tokens; None where samples have none.
        seconds: what the run's number of tokens (samples) takes.
        cost: what its devices cost for that time; None where their price is not known.
        largest: whether it is the largest model that was found to fit.
    """

    what: str
    change: tuple[str, ...]
    trains_otherwise: bool
    gain: float | None
    gain_per_cost: float | None
    plan: str
    num_parameters: int
    devices: int
    predicted_step_seconds: float
    samples_per_second: float
    tokens_per_second: float | None
    seconds: float
    cost: float | None
    largest: bool = False


@dataclass(frozen=True)
class ProfiledLayers:
    """Measured seconds of layers that are the same program, with all devices at work.

    Attributes:
        layers: indices of the layers.
        model: number of devices of the model axis.
        rows: number of rows of the measured slice.
        forward_seconds: forward pass of the slice.
        backward_seconds: backward pass of the slice.
        failure: why there are no measurements, if there are none.
    """

    layers: tuple[int, ...]
    model: int
    rows: int
    forward_seconds: float
    backward_seconds: float
    failure: str = ""


@dataclass(frozen=True)
class Plan(Staged):
    """The whole plan.

    For a step with several losses this is the plan of the first, with the predictions for the whole
    step.

    Attributes:
        predicted_within: how far off the predicted step may be, as `pipeline.half_width` says.
        predicted_tflops_per_device: counts the model's operations only, as MFU does.
        predicted_tflops_per_device_with_remat: also counts the operations that are recomputed.
        runners_up: the next best plans of a search.
        notes: what a person should know about the plan.
        loss: how the slices' losses make that of the whole batch, in words.
        layer_ends: where layers end (`trace.auto_layers`); None: at the model's own marks.
        profiled: the measurements that the predictions rest on, if there are any.
        further: the plans of the losses after the first, which run one after the other.
        workers: the processes that run it, of a run once they have started.
        reduction: how gradients are summed over the replicas.
        exchanges: what workers exchange through parameter servers, in order.
        least_step_seconds: a lower bound on the step of every plan that was searched for, proved
            for estimates, times this plan's prediction over its own estimate; None where there is
            none.
        jax_version: the JAX that traced the program; another one may trace it to other equations.
        tried: the plans of which this is the fastest as measured, in the order of their
            predictions; empty if it was chosen by its prediction.
        compiled: what a compiler makes of its programs, if it was asked.
        advice: other settings that were planned, if that was asked.
    """

    method: str
    schedule: str
    num_micro_batches: int
    batch_size: int
    num_parameters: int
    stages: tuple[StagePlan, ...]
    transfers: tuple[Transfer, ...]
    cluster: dict[str, Any]
    flops_per_step: float
    predicted_step_seconds: float
    predicted_samples_per_second: float
    predicted_tflops_per_device: float
    predicted_tflops_per_device_with_remat: float
    predicted_bubble_fraction: float
    fingerprint: str
    runners_up: tuple[RunnerUp, ...] = ()
    notes: tuple[str, ...] = ()
    loss: str = ""
    layer_ends: LayerEnds | None = None
    profiled: tuple[ProfiledLayers, ...] = ()
    further: tuple[Plan, ...] = ()
    workers: tuple[WorkerInfo, ...] = ()
    reduction: Reduction = DEFAULT_REDUCTION
    exchanges: tuple[ServerExchange, ...] = ()
    predicted_within: float = 0.0
    least_step_seconds: float | None = None
    tried: tuple[Trial, ...] = ()
    jax_version: str = ""
    compiled: CompiledPlan | None = None
    advice: tuple[Advice, ...] = ()

    @property
    def parts(self) -> tuple[Plan, ...]:
        """The plans of all losses, in order."""
        return (self, *self.further)

    @property
    def all_stages(self) -> tuple[StagePlan, ...]:
        """The stages of all losses, those of the first one first."""
        return tuple(stage for part in self.parts for stage in part.stages)

    @property
    def all_meshes(self) -> tuple[tuple[int, ...], ...]:
        """The devices of every submesh that a loss uses, in the order of `all_stages`."""
        return tuple(dict.fromkeys(stage.devices for stage in self.all_stages))

    @property
    def num_devices(self) -> int:
        """Number of devices that the plan uses."""
        return sum(map(len, self.all_meshes))

    @property
    def held_devices(self) -> int:
        """Number of devices of the cluster: those that the plan leaves idle cost as much."""
        return int(self.cluster["hosts"] * self.cluster["devices_per_host"])

    @property
    def alike(self) -> tuple[RunnerUp, ...]:
        """The runners-up whose intervals overlap the plan's: they may as well be faster.

        There are none where the plan is the fastest as measured.
        """
        most = self.predicted_step_seconds * (1 + self.predicted_within) ** 2
        fit = (one for one in self.runners_up if one.fits and not self.tried)
        return tuple(one for one in fit if one.predicted_step_seconds <= most)

    @property
    def missing_bytes(self) -> int:
        """Bytes of memory that the devices of the most demanding stage lack.

        It is not above 0 where all stages fit, or where the devices' memory is not known.
        """
        there = self.cluster["memory_bytes"]
        return 0 if there is None else max(stage.memory_bytes for stage in self.all_stages) - there

    def with_compiled_memory(self) -> Plan:
        """Return the plan with the compiler's memory in place of the predicted, where known."""
        assert self.compiled is not None
        left = iter(self.compiled.stages)
        parts = [
            dataclasses.replace(
                part,
                stages=tuple(
                    dataclasses.replace(stage, memory_bytes=known)
                    if (known := next(left).memory_bytes) is not None
                    else stage
                    for stage in part.stages
                ),
            )
            for part in self.parts
        ]
        return dataclasses.replace(parts[0], further=tuple(parts[1:]))

    def validate(self, step: TracedStep) -> None:
        """Check that the plan, perhaps edited by hand, can be carried out.

        Args:
            step: the step that it is to run.

        Raises:
            PlanError: layers or devices are missing, unknown or used twice, a logical mesh is of
                another size than its devices, a schedule or remat is unknown or does not fit, a
                sharding does not fit, or the batch does not divide; the message says where.
        """
        check_devices(self.all_stages, self.cluster)
        check_parts(self.parts, len(step.parts))
        for plan, part in zip(self.parts, step.parts, strict=True):
            check_part(plan, part)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-able data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> Plan:
        """Return the plan from the data of `to_dict`, or of a `plan.json`.

        Raises:
            PlanError: a field is missing, unknown or of another type; the message names it.
        """
        try:
            plan = read(cls, tree)
            read(ClusterShape, plan.cluster, "cluster")
            return plan
        except DamagedError as error:
            raise PlanError(f"this is not a plan of this version: {error}") from error


def check_part(plan: Plan, step: TracedStep) -> None:
    """Raise PlanError if the plan of one loss cannot be carried out."""
    servers, ends = plan.reduction.checked().servers, plan.layer_ends or ()
    for x in plan.exchanges:
        if not 0 <= x.server < servers:
            raise PlanError(f"{x.name} is summed by server {x.server}, and there are {servers}")
    if list(ends) != sorted(ends) or any(min(end) < 0 for end in ends):
        raise PlanError(f"layer_ends={ends} are not ascending pairs of whole numbers")
    if plan.batch_size != step.batch_size:
        raise PlanError(f"batch_size={plan.batch_size}, but the step's is {step.batch_size}")
    try:
        validate(plan.assignment, step.cut_at(plan.layer_ends))
    except BatchError as error:
        raise PlanError(
            f"num_micro_batches={plan.num_micro_batches} on {plan.num_replicas} replicas: {error}"
        ) from error


def check_devices(stages: Sequence[StagePlan], cluster: Mapping[str, Any]) -> None:
    """Raise PlanError if stages do not fit the cluster's devices.

    Every stage has to be on devices of the cluster and on the hosts that it names, and stages on
    the same devices have to have logical meshes of the same shape.
    """
    each = cluster["devices_per_host"]
    count = cluster["hosts"] * each
    first: dict[tuple[int, ...], int] = {}
    for index, stage in enumerate(stages):
        unknown = sorted(set(stage.devices) - set(range(count)))
        if unknown:
            raise PlanError(f"device {unknown[0]} is not one of the cluster's, 0 to {count - 1}")
        hosts = tuple(sorted({device // each for device in stage.devices}))
        if stage.hosts != hosts:
            raise PlanError(
                f"stage {index}: hosts {list(stage.hosts)} are not those of its devices, "
                f"{list(hosts)}"
            )
        other = first.setdefault(stage.devices, index)
        if stages[other].logical_mesh != stage.logical_mesh:
            raise PlanError(
                f"stages {other} and {index} are on the same devices with logical meshes of "
                f"{stages[other].logical_mesh} and {stage.logical_mesh}; give both the same"
            )


def check_parts(parts: Sequence[Staged], num_losses: int) -> None:
    """Raise PlanError if these are not plans for the losses of one step.

    There has to be one for each loss, and they have to share the submeshes and cut the batch alike.
    """
    if len(parts) != num_losses:
        raise PlanError(f"this is a plan for {len(parts)} of the step's {num_losses} losses")
    if len({(part.num_micro_batches, part.num_replicas) for part in parts}) > 1:
        cuts = " and ".join(f"{part.num_micro_batches}×{part.num_replicas}" for part in parts)
        raise PlanError(
            f"the losses cut the batch into {cuts} slices (microbatches × data-parallel replicas); "
            "all losses of a step have to cut it alike"
        )
    meshes = {stage.devices for part in parts for stage in part.stages}
    devices = [device for mesh in meshes for device in mesh]
    if len(set(devices)) != len(devices):
        raise PlanError(f"a device is in two submeshes: {sorted(devices)}")
