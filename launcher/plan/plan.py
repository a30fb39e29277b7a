"""The plan: where and when a train step runs, and what that is expected to cost. Pure data.

Every parallel method ends in one of these; the runtime executes nothing else. It is JSON on disk.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from launcher.plan.errors import PlanError


@dataclass(frozen=True)
class StagePlan:
    """One stage: its layers and its submesh.

    Attributes:
        layers: indices of the layers, consecutive. hosts, devices: the submesh (global numbers).
        logical_mesh: the submesh's shape as (data, model).
        remat: "none", or "full": the backward pass computes the forward pass again.
        forward_seconds, backward_seconds: predicted, for one microbatch.
        memory_bytes: predicted peak on one device. num_parameters: those that live here.
        shardings: `{what: how}` in words.
    """

    layers: tuple[int, ...]
    hosts: tuple[int, ...]
    devices: tuple[int, ...]
    logical_mesh: tuple[int, int]
    remat: str
    forward_seconds: float
    backward_seconds: float
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
    """The whole plan; see `docs` of the fields' sections in the README.

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
        return sum(len(stage.devices) for stage in self.stages)

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
