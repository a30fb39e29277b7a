"""The plan: where and when a train step runs, and what that is expected to cost. Pure data.

Every parallel method ends in one of these; the runtime executes nothing else. It is JSON on disk.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from launcher.plan.errors import PlanError
from launcher.plan.schedule import Schedule, make_schedule


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
            backward_weight_seconds: of the latter, what `zero_bubble` puts off.
        memory_bytes: predicted peak on one device of the mesh, with all of its stages.
        num_parameters: those that live here.
        shardings: `{what: how}` in words.
    """

    layers: tuple[int, ...]
    hosts: tuple[int, ...]
    devices: tuple[int, ...]
    logical_mesh: tuple[int, int]
    remat: str
    forward_seconds: float
    backward_seconds: float
    backward_weight_seconds: float
    memory_bytes: int
    num_parameters: int
    shardings: dict[str, str]


@dataclass(frozen=True)
class Transfer:
    """What crosses from one stage to another: bytes every microbatch and once a step."""

    src_stage: int
    dst_stage: int
    bytes_per_microbatch: int
    bytes_per_step: int


@dataclass(frozen=True)
class Plan:
    """The whole plan.

    `predicted_tflops_per_device` counts the model's operations only, as MFU does;
    `…_with_remat` also those that are done again.
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

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas of every stage."""
        return self.stages[0].logical_mesh[0]

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

    def tasks(self) -> Schedule:
        """The schedule of a step: for every mesh, its tasks in order.

        Raises:
            PlanError: stages share meshes in another order than the schedule has them.
        """
        count = len(self.meshes)
        if self.mesh_of != tuple(s % count for s in range(len(self.stages))):
            raise PlanError(
                f"stages on the same devices must come round in turn; {len(self.stages)} stages "
                f"are on meshes {', '.join(map(str, self.mesh_of))}"
            )
        return make_schedule(self.schedule, len(self.stages), count, self.num_micro_batches)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> Plan:
        """From `to_dict`'s data, or a `plan.json`.

        Raises:
            PlanError: a field is missing or unknown.
        """
        try:
            stages = tuple(StagePlan(**_tuples(stage)) for stage in tree["stages"])
            transfers = tuple(Transfer(**t) for t in tree["transfers"])
            return cls(**{**tree, "stages": stages, "transfers": transfers})
        except (TypeError, KeyError) as error:
            raise PlanError(f"this is not a plan of this version: {error}") from error


def _tuples(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in tree.items()}
