"""Which devices each submesh of a pipeline gets, and their links. Pure."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.cost.formulas import Links, ring_links


def place_submeshes(sizes: Sequence[int], cluster: ClusterShape) -> list[tuple[int, ...]]:
    """Return devices for submeshes of these sizes, in the pipeline's order.

    Submeshes that fill hosts get whole hosts; the others share hosts with their neighbours where
    they can. Where no such placement fits, the devices are taken in their order.
    """
    each = cluster.devices_per_host
    fresh = iter(range(cluster.hosts))
    room: list[list[int]] = []  # devices that are left on the hosts that were begun
    found: list[tuple[int, ...]] = []
    for size in sizes:
        hosts = 1 if size < each else -(-size // each)
        begun = [left for left in room if len(left) >= size] if size < each else []
        if begun:
            left = begun[-1]
        else:
            taken = [host for _, host in zip(range(hosts), fresh, strict=False)]
            if len(taken) < hosts:
                return _in_order(sizes)
            left = [host * each + d for host in taken for d in range(each)]
            room.append(left)
        found.append(tuple(left[:size]))
        del left[:size]
    return found


def _in_order(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [tuple(range(first, first + size)) for first, size in zip(firsts, sizes, strict=True)]


@functools.cache
def links_within(data: int, model: int, cluster: ClusterShape) -> Links:
    """Return the links of a submesh that takes the devices in order, from the first of a host."""
    hosts = [cluster.host_of(device) for device in range(data * model)]
    return ring_links(hosts, model, cluster)
