"""The stages of a plan with their predicted seconds, and the transfers between them.

Pure data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.partition import Assignment, Reduction, Spec, Submesh
from launcher.schedule import Tasks


@dataclass(frozen=True)
class Collectives:
    """Collectives of one kind among the devices of a stage.

    Attributes:
        when: "forward" or "backward", for one microbatch; "update", once a step.
        kind: "all-reduce", "all-gather" or "reduce-scatter".
        axis: "data" or "model".
        count: number of arrays.
        bytes: bytes of these arrays on one device, where they are not sharded along the axis.
    """

    when: str
    kind: str
    axis: str
    count: int
    bytes: int


@dataclass(frozen=True)
class SummedTogether:
    """A bucket: gradients that one collective sums over the replicas.

    Attributes:
        when: "backward", in every microbatch; "update", once a step.
        kind: "all-reduce" or "reduce-scatter".
        dtype: the type in which they cross.
        tensors: the parameters that they are the gradients of, in the order in which the backward
            pass makes them.
        bytes: their bytes on one device, where they are not sharded along data.
    """

    when: str
    kind: str
    dtype: str
    tensors: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class RingSeconds:
    """Seconds in which collectives occupy the links of their rings, which latency does not.

    Attributes:
        model: those along the model axis.
        data: those along the data axis.
    """

    model: float = 0.0
    data: float = 0.0


NO_RINGS = RingSeconds()


@dataclass(frozen=True)
class StagePlan:
    """One stage: its layers and its submesh.

    Stages with the same devices share their mesh.

    Attributes:
        layers: indices of the layers, consecutive.
        hosts: the hosts of the submesh, by their global numbers.
        devices: the devices of the submesh, by their global numbers.
        logical_mesh: the submesh's shape as (data, model).
        remat: what the backward pass recomputes, a string of `base.names`: "none", "full",
            "selective", or everything but what a policy of `jax.checkpoint_policies` keeps, layer
            by layer; "full/2" every two layers together, "full:2" the first two layers,
            "full:2+selective" the others besides, selectively.
        forward_seconds: predicted forward pass of one microbatch.
        backward_seconds: predicted backward pass of one microbatch.
        backward_weight_seconds: the part of `backward_seconds` that may wait
            (`Schedule.splits_backward`).
        update_seconds: predicted, once a step, to sum the gradients and to update.
        memory_bytes: predicted peak memory of one device of the mesh, with all of its stages.
        num_parameters: number of parameters that live here.
        shardings: `{argument leaf: for each dimension an axis, several, or None}`. The axes are
            "data" and "model"; a leaf that is not named is replicated on every device.
        collectives: predicted, those of the whole stage for one replica.
        effective_parallelism: as in `ClusterShape`, for this stage's tasks; None: each device has
            its own resources, or it is the cluster's.
        buckets: the gradients that are summed over the replicas together, in the order in which
            the backward pass makes them.
        exchange_seconds: predicted, of `update_seconds`, what goes through parameter servers.
        own_checkpoints: number of the layers that the model checkpoints itself (`jax.checkpoint`,
            `nn.remat`); `remat` is about the others.
        hidden_seconds: predicted, of the sums once a step, what runs under the last microbatch's
            backward pass; the rest is in `update_seconds`.
        pass_rings: predicted, of the collectives of a microbatch's passes.
        once_rings: predicted, of the collectives once a step, hidden ones included.
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
    effective_parallelism: float | None = None
    buckets: tuple[SummedTogether, ...] = ()
    hidden_seconds: float = 0.0
    exchange_seconds: float = 0.0
    own_checkpoints: int = 0
    pass_rings: RingSeconds = NO_RINGS
    once_rings: RingSeconds = NO_RINGS


@dataclass(frozen=True)
class ServerExchange:
    """Values that every worker gives a part of once a step, and of which each gets the whole.

    Attributes:
        name: what crosses, in words.
        when: "before": rows of the batch's leaves that the step reads whole; "update": what the
            loss makes.
        kind: "sum": a bucket of gradients, added in the order of the workers' numbers; "gather":
            rows of the batch, or results of the loss, joined in that order.
        dtype: the type in which they cross; what is gathered crosses as bytes.
        bytes: of one worker's part.
        server: the number of the server that makes the whole.
    """

    name: str
    when: str
    kind: str
    dtype: str
    bytes: int
    server: int = 0

    def whole_bytes(self, workers: int) -> int:
        """Return the bytes that each of so many workers gets."""
        return self.bytes * workers if self.kind == "gather" else self.bytes


@dataclass(frozen=True)
class Transfer:
    """Bytes sent from one stage to another, in every microbatch and once a step."""

    src_stage: int
    dst_stage: int
    bytes_per_microbatch: int
    bytes_per_step: int


def transfers_by_link(
    every: Mapping[tuple[int, int], int], once: Mapping[tuple[int, int], int]
) -> tuple[Transfer, ...]:
    """Return the transfers, given their bytes by (source, destination) stage.

    Args:
        every: in every microbatch.
        once: once a step.
    """
    links = sorted({*every, *once})
    return tuple(Transfer(*link, every.get(link, 0), once.get(link, 0)) for link in links)


class Staged:
    """Timed stages and a schedule that they run under: a plan, or what becomes one."""

    method: str
    schedule: str
    num_micro_batches: int
    stages: tuple[StagePlan, ...]
    transfers: tuple[Transfer, ...]
    cluster: dict[str, Any]
    reduction: Reduction

    @property
    def assignment(self) -> Assignment:
        """The decisions of the parallel method, and the shardings of every stage."""
        shape = {stage.devices: stage.logical_mesh for stage in self.stages}
        return Assignment(
            method=self.method,
            layers=tuple(stage.layers for stage in self.stages),
            submeshes=tuple(Submesh(devices, shape[devices]) for devices in self.meshes),
            mesh_of=self.mesh_of,
            num_micro_batches=self.num_micro_batches,
            schedule=self.schedule,
            remat=tuple(stage.remat for stage in self.stages),
            shardings=tuple(stage.shardings for stage in self.stages),
            reduction=self.reduction,
        )

    @property
    def num_replicas(self) -> int:
        """Number of data-parallel replicas that all stages have in common."""
        return math.gcd(*(stage.logical_mesh[0] for stage in self.stages))

    @property
    def num_devices(self) -> int:
        """Number of devices that the plan uses."""
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
    def most_bytes(self) -> int:
        """Predicted bytes of the device that needs the most."""
        return max(stage.memory_bytes for stage in self.stages)

    @property
    def mesh_seconds(self) -> tuple[float, ...]:
        """Predicted seconds of a microbatch's forward and backward pass, on each mesh.

        They are those of all its stages.
        """
        found = [0.0] * len(self.meshes)
        for stage, mesh in zip(self.stages, self.mesh_of, strict=True):
            found[mesh] += stage.forward_seconds + stage.backward_seconds
        return tuple(found)

    @property
    def busy_seconds(self) -> float:
        """Predicted seconds of a step in which the busiest mesh works on microbatches."""
        return self.num_micro_batches * max(self.mesh_seconds)

    def tasks(self) -> Tasks:
        """Return for every mesh its tasks of a step, in order.

        Raises:
            PlanError: as `Assignment.tasks` does.
        """
        return self.assignment.tasks()


def describe_plan(plan: Staged) -> str:
    """Return a plan in a few words: stages, meshes, microbatches, schedule, rematerialisation."""
    shapes = list(dict.fromkeys(stage.logical_mesh for stage in plan.stages))
    meshes = " and ".join(f"{data}x{model}" for data, model in shapes[:3])
    remat = sorted({stage.remat for stage in plan.stages} - {"none"})
    count = len(plan.stages)
    parts = [
        f"{count} stage{'s' if count > 1 else ''} of {meshes}{' …' if len(shapes) > 3 else ''}",
        f"{plan.num_micro_batches} microbatch{'es' if plan.num_micro_batches > 1 else ''}",
        plan.schedule,
        *([f"remat {' and '.join(remat[:3])}{' …' if len(remat) > 3 else ''}"] if remat else []),
    ]
    return ", ".join(parts)
