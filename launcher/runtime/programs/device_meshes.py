"""Place a step's slots on devices: the plan's meshes and the shardings of slots."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher.partition import AXES, mesh_sizes
from launcher.plan import Plan
from launcher.runtime.emit.instructions import Send, Slot
from launcher.runtime.programs.collectives import partition_spec
from launcher.runtime.transport.transfer import is_here


@dataclass(frozen=True, eq=False)
class DeviceMeshes:
    """The meshes and shardings of a step.

    Attributes:
        meshes: the plan's meshes.
        slots: what each slot holds.
        shardings: the sharding of what each slot holds. Equal ones are the same object, since JAX
            compares those of a program's arguments with each call.
        owners: for every mesh, the processes that own one of its devices.
    """

    meshes: tuple[Mesh, ...]
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
    assignments = [part.assignment for part in plan.parts]
    own = {
        submesh.devices: assignment.own_submesh(mesh)
        for assignment in assignments
        for mesh, submesh in enumerate(assignment.submeshes)
    }
    replicas = assignments[0].slicing.own_replicas
    meshes = [
        Mesh(
            np.array([devices[d] for d in own[mesh].devices]).reshape(
                tuple(mesh_sizes(own[mesh].logical_mesh, replicas).values())
            ),
            AXES,
        )
        for mesh in plan.all_meshes
    ]
    distinct = {
        (slot.mesh, slot.spec): NamedSharding(meshes[slot.mesh], partition_spec(slot.spec))
        for slot in slots
    }
    shardings = tuple(distinct[slot.mesh, slot.spec] for slot in slots)
    owners = tuple(frozenset(d.process_index for d in mesh.devices.flat) for mesh in meshes)
    return DeviceMeshes(tuple(meshes), tuple(slots), shardings, owners)
