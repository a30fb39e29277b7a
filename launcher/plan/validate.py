"""Checks that a plan, which a person may have edited, can be carried out.

See `Plan.validate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.partition.errors import PlanError
from launcher.plan.stage_plan import ServerExchange, Staged, StagePlan
from launcher.trace.auto_layers import LayerEnds


def check_ends(ends: LayerEnds) -> None:
    """Raise PlanError if the layers' ends are not in order."""
    if list(ends) != sorted(ends) or any(min(end) < 0 for end in ends):
        raise PlanError(f"layer_ends={ends} are not ascending pairs of whole numbers")


def check_servers(exchanges: Sequence[ServerExchange], servers: int) -> None:
    """Raise PlanError if a server is unknown."""
    for x in exchanges:
        if not 0 <= x.server < servers:
            raise PlanError(f"{x.name} is summed by server {x.server}, and there are {servers}")


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
