"""The plan: where and when a train step runs, and what that is expected to cost. Pure data.

Every parallel method ends in one of these; the runtime executes nothing else. It is JSON on disk.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from launcher.files import DamagedError
from launcher.partition.errors import PlanError
from launcher.partition.validate import validate
from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.stage_plan import Staged, StagePlan, Transfer
from launcher.plan.validate import check_devices, check_ends
from launcher.reading import read
from launcher.trace.clusters import LayerEnds
from launcher.trace.errors import BatchError
from launcher.trace.step import TracedStep


@dataclass(frozen=True)
class RunnerUp:
    """A plan that the search found worse: in words, its predicted step, and why it lost."""

    plan: str
    predicted_step_seconds: float
    why: str


@dataclass(frozen=True)
class ProfiledLayers:
    """What was measured of layers that are one program, on `model` devices of a model axis with
    all devices at work: the seconds of a slice of so many rows; or why there are none."""

    layers: tuple[int, ...]
    model: int
    rows: int
    forward_seconds: float
    backward_seconds: float
    failure: str = ""


@dataclass(frozen=True)
class Plan(Staged):
    """The whole plan.

    `predicted_tflops_per_device` counts the model's operations only, as MFU does;
    `…_with_remat` also those that are done again. `runners_up` are what a search found next best;
    `notes` say what a person should know of the plan. `layer_ends`: where layers end, as
    `trace.clusters` tells it; None: at the model's own marks.
    `profiled`: what the predictions rest on, where it was measured.
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
    layer_ends: LayerEnds | None = None
    profiled: tuple[ProfiledLayers, ...] = ()

    @property
    def missing_bytes(self) -> int:
        """How much more memory than they have the plan needs of the devices of the stage that lacks
        most; not above 0 where all fit, or where it is not known what they have."""
        there = self.cluster["memory_bytes"]
        return 0 if there is None else max(stage.memory_bytes for stage in self.stages) - there

    def validate(self, step: TracedStep) -> None:
        """Prove that the plan, perhaps edited by hand, can be carried out.

        Raises:
            PlanError: layers or devices that are missing, unknown or used twice, a logical mesh of
                another size than its devices, a schedule or remat that is unknown or does not fit,
                a sharding that does not, or a batch that does not divide; the message says where.
        """
        if self.layer_ends is not None:
            check_ends(self.layer_ends)
        check_devices(self.stages, self.cluster)
        if self.batch_size != step.batch_size:
            raise PlanError(f"batch_size={self.batch_size}, but the step's is {step.batch_size}")
        try:
            validate(self.assignment, step.cut_at(self.layer_ends))
        except BatchError as error:
            raise PlanError(
                f"num_micro_batches={self.num_micro_batches} on {self.num_replicas} replicas: "
                f"{error}"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> Plan:
        """From `to_dict`'s data, or a `plan.json`.

        Raises:
            PlanError: a field is missing, unknown or of another type; the message names it.
        """
        try:
            plan = read(cls, tree)
            read(ClusterShape, plan.cluster, "cluster")
            return plan
        except DamagedError as error:
            raise PlanError(f"this is not a plan of this version: {error}") from error
