"""Which devices each submesh of a pipeline gets, and their links. Pure."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from launcher.hardware.cluster_shape import ClusterShape
from launcher.plan.cost.formulas import Links, ring_links
from launcher.plan.inter_op.divisors import divisors, spread_divisors


def model_sizes(cluster: ClusterShape) -> list[int]:
    """Return the sizes of the model axis: it stays inside a host, whose links are the fast ones."""
    each = cluster.devices_per_host
    return divisors(each, each)


def submesh_sizes(cluster: ClusterShape, batch_size: int) -> tuple[int, ...]:
    """Return the numbers of devices that a stage may have, the others of its hosts being idle.

    They are all that rows can be shared by: the product of a divisor of the batch and a size of the
    model axis. If the batch has more than 20 divisors, only some of those larger than a host are
    taken (`spread_divisors`), and those that fill the cluster.
    """
    most, models = cluster.num_devices, model_sizes(cluster)
    whole = {most // model for model in models if batch_size % (most // model) == 0}
    inside = divisors(batch_size, cluster.devices_per_host)
    shares = {*inside, *spread_divisors(batch_size, most), *whole}
    found = {data * model for data in shares for model in models}
    return tuple(sorted(size for size in found if size <= most))


def place_submeshes(sizes: Sequence[int], cluster: ClusterShape) -> list[tuple[int, ...]]:
    """Return devices for submeshes of these sizes, in the pipeline's order.

    Submeshes that fill hosts get whole hosts; the others share hosts with their neighbours where
    they can. Where no such placement fits, the devices are taken in their order (`in_order`).
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
                return in_order(sizes, cluster)
            left = [host * each + d for host in taken for d in range(each)]
            room.append(left)
        found.append(tuple(left[:size]))
        del left[:size]
    return found


def in_order(sizes: Sequence[int], cluster: ClusterShape) -> list[tuple[int, ...]]:
    """Return devices one after another: of the submeshes that fill hosts first, so that they do."""
    fills = [size % cluster.devices_per_host == 0 for size in sizes]
    found: list[tuple[int, ...]] = [()] * len(sizes)
    first = 0
    for s in sorted(range(len(sizes)), key=lambda s: not fills[s]):
        found[s] = tuple(range(first, first + sizes[s]))
        first += sizes[s]
    return found


@functools.cache
def links_within(data: int, model: int, cluster: ClusterShape) -> Links:
    """Return the links of a submesh that takes the devices in order, from the first of a host."""
    hosts = [cluster.host_of(device) for device in range(data * model)]
    return ring_links(hosts, model, cluster)
