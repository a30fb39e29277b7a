"""A parallel method's decision: which layers run where, in which order, on which slices."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.partition.errors import PlanError
from launcher.partition.reduction import DEFAULT_REDUCTION, Reduction
from launcher.partition.sharding.named_dims import Spec
from launcher.partition.slicing import Slicing
from launcher.schedule import SCHEDULES, Tasks, make_tasks


@dataclass(frozen=True)
class Submesh:
    """Devices by their global numbers, and their shape as (data, model)."""

    devices: tuple[int, ...]
    logical_mesh: tuple[int, int]


@dataclass(frozen=True)
class Assignment:
    """Which layers run where, and in which order.

    Attributes:
        method: the name that the plan carries.
        layers: of every stage. mesh_of: its submesh, by number.
        remat: of every stage, a string of `base.names`.
        zero: of every stage 0, 2 (gradients and optimizer state are cut along data) or 3
            (parameters, too); empty: 0 for all.
        sequence: of every stage whether its model axis cuts the data along its sequence, and not
            the parameters; empty: none.
        shardings: of every stage, as in `StagePlan`; None: to be chosen.
        reduction: how gradients are summed over the replicas.
    """

    method: str
    layers: tuple[tuple[int, ...], ...]
    submeshes: tuple[Submesh, ...]
    mesh_of: tuple[int, ...]
    num_micro_batches: int
    schedule: str
    remat: tuple[str, ...]
    zero: tuple[int, ...] = ()
    sequence: tuple[bool, ...] = ()
    shardings: tuple[Mapping[str, Spec] | None, ...] = ()
    reduction: Reduction = DEFAULT_REDUCTION

    def zero_of(self, stage: int) -> int:
        """See `zero`."""
        return self.zero[stage] if self.zero else 0

    def shardings_of(self, stage: int) -> Mapping[str, Spec] | None:
        """See `shardings`."""
        return self.shardings[stage] if self.shardings else None

    def sequence_of(self, stage: int) -> bool:
        """See `sequence`."""
        return bool(self.sequence) and self.sequence[stage]

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas that all stages have in common."""
        return math.gcd(*(submesh.logical_mesh[0] for submesh in self.submeshes))

    @functools.cached_property
    def slicing(self) -> Slicing:
        """How the batch is cut."""
        return Slicing(self.num_micro_batches, self.num_replicas, self.reduction.workers)

    def own_submesh(self, mesh: int) -> Submesh:
        """Return a submesh, or the first worker's share of it where parameter servers sum."""
        (data, model), workers = self.submeshes[mesh].logical_mesh, self.reduction.workers
        devices = self.submeshes[mesh].devices
        return Submesh(devices[: len(devices) // workers], (data // workers, model))

    def tasks(self) -> Tasks:
        """Return for every submesh its tasks of a step, in order.

        Raises:
            PlanError: stages share submeshes, and the schedule has none do so, or in another order.
        """
        num_stages, count = len(self.layers), len(self.submeshes)
        if self.mesh_of != tuple(s % count for s in range(num_stages)):
            raise PlanError(
                f"stages on the same devices must take turns; {num_stages} stages "
                f"are on meshes {', '.join(map(str, self.mesh_of))}"
            )
        several = SCHEDULES[self.schedule].interleaves
        if num_stages % count or (num_stages > count and not several):
            raise PlanError(f"{self.schedule} cannot run {num_stages} stages on {count} submeshes")
        return make_tasks(self.schedule, num_stages, count, self.num_micro_batches)
