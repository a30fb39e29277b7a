"""Place a step's slots on devices: the plan's meshes and the shardings of slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher.partition import AXES, mesh_sizes
from launcher.plan import Plan
from launcher.runtime.emit.instructions import Send, Slot
from launcher.runtime.programs.collectives import abstract_mesh, partition_spec
from launcher.runtime.transport.transfer import is_here


@dataclass(frozen=True, eq=False)
class DeviceMeshes:
    """The meshes and shardings of a step.

    Attributes:
        meshes: the plan's meshes, abstract ones where the devices are not here.
        slots: what each slot holds.
        shardings: the sharding of what each slot holds. Equal ones are the same object, since JAX
            compares those of a program's arguments with each call.
        owners: for every mesh, the processes that own one of its devices.
    """

    meshes: tuple[Any, ...]
    slots: tuple[Slot, ...]
    shardings: tuple[NamedSharding, ...]
    owners: tuple[Set[int], ...]

    def sharding(self, slot: int) -> NamedSharding:
        """Return the sharding of what a slot holds."""
        return self.shardings[slot]

    def whole(self, mesh: int) -> NamedSharding:
        """Return the sharding of a value that is replicated over a mesh."""
        return NamedSharding(self.meshes[mesh], PartitionSpec())

    def runs_here(self, mesh: int) -> bool:
        """Return whether this process owns a device of a mesh."""
        return is_here(self.whole(mesh))

    def is_local(self, send: Send) -> bool:
        """Return whether one process owns all devices of both sides."""
        return len(self.owners[send.src] | self.owners[send.dst]) == 1


def place_on_devices(
    plan: Plan, devices: Sequence[jax.Device], slots: Sequence[Slot]
) -> DeviceMeshes:
    """Place a plan on devices.

    Args:
        plan: the plan.
        devices: numbered as the plan numbers them, or a worker's own.
        slots: what each slot holds.
    """

    def mesh(numbers: Sequence[int], sizes: Mapping[str, int]) -> Mesh:
        there = np.array([devices[number] for number in numbers])
        return Mesh(there.reshape(tuple(sizes.values())), AXES)

    return _placed(plan, slots, [device.process_index for device in devices], mesh)


def place_without_devices(plan: Plan, owners: Sequence[int], slots: Sequence[Slot]) -> DeviceMeshes:
    """Place a plan on abstract meshes: its programs can be lowered, and nothing can run.

    Args:
        plan: the plan.
        owners: the process of each device, numbered as the plan numbers them.
        slots: what each slot holds.
    """
    return _placed(plan, slots, owners, lambda _, sizes: abstract_mesh(sizes))


def _placed(
    plan: Plan,
    slots: Sequence[Slot],
    processes: Sequence[int],
    mesh_of: Callable[[Sequence[int], Mapping[str, int]], Any],
) -> DeviceMeshes:
    """Place a plan on the meshes that `mesh_of` makes of devices' numbers and axes' sizes."""
    assignments = [part.assignment for part in plan.parts]
    own = {
        submesh.devices: assignment.own_submesh(mesh)
        for assignment in assignments
        for mesh, submesh in enumerate(assignment.submeshes)
    }
    replicas = assignments[0].slicing.own_replicas
    meshes = [
        mesh_of(own[mesh].devices, mesh_sizes(own[mesh].logical_mesh, replicas))
        for mesh in plan.all_meshes
    ]
    distinct = {
        (slot.mesh, slot.spec): NamedSharding(meshes[slot.mesh], partition_spec(slot.spec))
        for slot in slots
    }
    shardings = tuple(distinct[slot.mesh, slot.spec] for slot in slots)
    owners = tuple(frozenset(processes[d] for d in own[mesh].devices) for mesh in plan.all_meshes)
    return DeviceMeshes(tuple(meshes), tuple(slots), shardings, owners)
