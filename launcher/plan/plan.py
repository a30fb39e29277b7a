"""The plan: where and when a train step runs, and what that is expected to cost. Pure data.

Every parallel method ends in one of these; the runtime executes nothing else. It is JSON on disk.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from launcher.files import DamagedError
from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.errors import PlanError
from launcher.plan.proof import prove
from launcher.plan.sharding.dims import Spec
from launcher.reading import read
from launcher.schedule import SCHEDULES, Tasks, make_tasks
from launcher.trace.clusters import LayerEnds
from launcher.trace.step import TracedStep


@dataclass(frozen=True)
class Collectives:
    """What the devices of a stage do together, of one kind.

    Attributes:
        when: "forward" or "backward", of one microbatch; "update", once a step.
        kind: "all-reduce", "all-gather" or "reduce-scatter". axis: "data" or "model".
        count: how many arrays. bytes: of these on one device, where they are whole along the axis.
    """

    when: str
    kind: str
    axis: str
    count: int
    bytes: int


@dataclass(frozen=True)
class StagePlan:
    """One stage: its layers and its submesh. Stages with the same devices share their mesh.

    Attributes:
        layers: indices of the layers, consecutive. hosts, devices: the submesh (global numbers).
        logical_mesh: the submesh's shape as (data, model).
        remat: what the backward pass computes again: "none", "full", or all but what a policy of
            `jax.checkpoint_policies`, by its name, keeps. Without effect where a microbatch's
            backward pass follows its forward pass at once.
        forward_seconds, backward_seconds: predicted, for one microbatch;
            backward_weight_seconds: of the latter, what may wait
            (`Schedule.splits_backward`);
            update_seconds: predicted, once a step, to sum gradients and to update.
        memory_bytes: predicted peak on one device of the mesh, with all of its stages.
        num_parameters: those that live here.
        shardings: `{argument leaf: for each dimension an axis, several, or None}`. The axes are
            "data" and "model"; a leaf that is not named is on every device.
        collectives: predicted, those of the whole stage for one replica.
        at_once: of its tasks what `ClusterShape.at_once` is of the cluster's, if it was measured.
    """

    layers: tuple[int, ...]
    hosts: tuple[int, ...]
    devices: tuple[int, ...]
    logical_mesh: tuple[int, int]
    remat: str
    forward_seconds: float
    backward_seconds: float
    backward_weight_seconds: float
    update_seconds: float
    memory_bytes: int
    num_parameters: int
    shardings: dict[str, Spec]
    collectives: tuple[Collectives, ...] = ()
    at_once: float | None = None


@dataclass(frozen=True)
class Transfer:
    """What crosses from one stage to another: bytes every microbatch and once a step."""

    src_stage: int
    dst_stage: int
    bytes_per_microbatch: int
    bytes_per_step: int


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
class Plan:
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

    @classmethod
    def unpredicted(
        cls,
        *,
        method: str,
        schedule: str,
        num_micro_batches: int,
        batch_size: int,
        stages: tuple[StagePlan, ...],
        cluster: ClusterShape,
        transfers: tuple[Transfer, ...] = (),
        fingerprint: str = "",
        layer_ends: LayerEnds | None = None,
    ) -> Plan:
        """A plan of which nothing is predicted yet (`predict.with_predictions` does)."""
        return cls(
            method=method,
            schedule=schedule,
            num_micro_batches=num_micro_batches,
            batch_size=batch_size,
            num_parameters=0,
            stages=stages,
            transfers=transfers,
            cluster=vars(cluster).copy(),
            flops_per_step=0.0,
            predicted_step_seconds=0.0,
            predicted_samples_per_second=0.0,
            predicted_tflops_per_device=0.0,
            predicted_tflops_per_device_with_remat=0.0,
            predicted_bubble_fraction=0.0,
            fingerprint=fingerprint,
            layer_ends=layer_ends,
        )

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas that all stages have in common."""
        return math.gcd(*(stage.logical_mesh[0] for stage in self.stages))

    @property
    def num_devices(self) -> int:
        """Devices that the plan uses."""
        return sum(map(len, self.meshes))

    @property
    def meshes(self) -> tuple[tuple[int, ...], ...]:
        """The devices of every submesh, in the order of their first stages."""
        return tuple(dict.fromkeys(stage.devices for stage in self.stages))

    @property
    def mesh_of(self) -> tuple[int, ...]:
        """The mesh of every stage, as an index into `meshes`."""
        meshes = self.meshes
        return tuple(meshes.index(stage.devices) for stage in self.stages)

    @property
    def mesh_seconds(self) -> tuple[float, ...]:
        """Predicted for both passes of a microbatch, on each mesh: of all its stages."""
        found = [0.0] * len(self.meshes)
        for stage, mesh in zip(self.stages, self.mesh_of, strict=True):
            found[mesh] += stage.forward_seconds + stage.backward_seconds
        return tuple(found)

    @property
    def missing_bytes(self) -> int:
        """How much more memory than they have the plan needs of the devices of the stage that lacks
        most; not above 0 where all fit, or where it is not known what they have."""
        there = self.cluster["memory_bytes"]
        return 0 if there is None else max(stage.memory_bytes for stage in self.stages) - there

    def tasks(self) -> Tasks:
        """For every mesh, its tasks of a step in order.

        Raises:
            PlanError: stages share meshes, and the schedule has none do so, or in another order.
        """
        count = len(self.meshes)
        if self.mesh_of != tuple(s % count for s in range(len(self.stages))):
            raise PlanError(
                f"stages on the same devices must come round in turn; {len(self.stages)} stages "
                f"are on meshes {', '.join(map(str, self.mesh_of))}"
            )
        several = SCHEDULES[self.schedule].interleaves
        if len(self.stages) % count or (len(self.stages) > count and not several):
            raise PlanError(
                f"{self.schedule} cannot run {len(self.stages)} stages on {count} submeshes"
            )
        return make_tasks(self.schedule, len(self.stages), count, self.num_micro_batches)

    def validate(self, step: TracedStep) -> None:
        """Prove that the plan, perhaps edited by hand, can be carried out.

        Raises:
            PlanError: layers or devices that are missing, unknown or used twice, a logical mesh of
                another size than its devices, a schedule or remat that is unknown or does not fit,
                a sharding that does not, or a batch that does not divide; the message says where.
        """
        prove(self, step)

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
