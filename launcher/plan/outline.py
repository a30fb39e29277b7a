"""What a parallel method decides before the plan's details follow from it. Pure data.

Used by `plan.methods`, which makes one, and `plan.make`, which completes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.plan.sharding.dims import Spec


@dataclass(frozen=True)
class Submesh:
    """Devices by their global numbers, and their shape as (data, model)."""

    devices: tuple[int, ...]
    logical_mesh: tuple[int, int]


@dataclass(frozen=True)
class Outline:
    """Which layers run where, and in which order.

    Attributes:
        method: the name that the plan carries.
        layers: of every stage. mesh_of: its submesh, by number.
        remat: of every stage, a name of `plan.remat.POLICIES`.
        zero: of every stage 0, 2 (gradients and optimizer state are cut along data) or 3
            (parameters, too); empty: 0 for all.
        sequence: of every stage whether its model axis cuts the data along its sequence, and not
            the parameters; empty: none.
        shardings: of every stage, as in `StagePlan`; None: to be chosen.
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

    def zero_of(self, stage: int) -> int:
        """See `zero`."""
        return self.zero[stage] if self.zero else 0

    def sequence_of(self, stage: int) -> bool:
        """See `sequence`."""
        return bool(self.sequence) and self.sequence[stage]

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas that all stages have in common."""
        return math.gcd(*(submesh.logical_mesh[0] for submesh in self.submeshes))
