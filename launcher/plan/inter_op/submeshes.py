"""Submeshes of a pipeline: their sizes, logical meshes, devices and links; points of the search.

Pure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.hardware import ClusterShape
from launcher.partition import DATA, DEFAULT_REDUCTION, MODEL, Reduction
from launcher.plan.cost.formulas import Links, ring_links

_MOST_DIVISORS = 20


@dataclass(frozen=True)
class SearchPoint:
    """The values held fixed during one stage search.

    Attributes:
        num_micro_batches: number of microbatches a step.
        batch_size: rows of the whole batch.
        replicas: number of replicas that all stages have in common; None: any, with the least
            memory over them.
        schedule: name of the schedule.
        remats: the remat strings to choose from, among them `FEWEST`.
        memory_bytes: memory of a device; None: no limit.
        reduction: how gradients are summed over the replicas.
    """

    num_micro_batches: int
    batch_size: int
    replicas: int | None
    schedule: str
    remats: tuple[str, ...]
    memory_bytes: float | None
    reduction: Reduction = DEFAULT_REDUCTION


@dataclass(frozen=True)
class Mesh:
    """A logical mesh.

    Attributes:
        axes: the size of each axis by its name, the outermost first.
        row: the row of the layer table that holds the costs on its model axis.
    """

    axes: tuple[tuple[str, int], ...]
    row: int

    @classmethod
    def of(cls, data: int, model: int, row: int) -> Mesh:
        """Return a mesh of a data and a model axis."""
        return cls(((DATA, data), (MODEL, model)), row)

    def size(self, axis: str) -> int:
        """Return the devices along an axis; 1 along one that the mesh does not have."""
        return dict(self.axes).get(axis, 1)

    @property
    def data(self) -> int:
        """The devices along the data axis."""
        return self.size(DATA)

    @property
    def devices(self) -> int:
        """The devices along all axes."""
        return math.prod(size for _, size in self.axes)

    def link_to_next(self, cluster: ClusterShape) -> tuple[float, int]:
        """Return the bytes/s of a link to the next stage, and how many links there are at most.

        Part of a host may be on two of them.
        """
        each = cluster.devices_per_host
        if cluster.hosts == 1 or self.devices < each:
            return cluster.intra_host, self.data
        partial = self.devices % each
        hosts = (self.devices - 2) // each + 2 if partial else self.devices // each
        return cluster.inter_host, min(self.data, hosts)


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
def links_within(mesh: Mesh, cluster: ClusterShape) -> Links:
    """Return the links of a submesh that takes the devices in order, from the first of a host."""
    return ring_links(range(mesh.devices), mesh.size(MODEL), cluster)


def divisors(number: int, most: int) -> list[int]:
    """Return all divisors of a number up to `most`."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted(n for n in {*low, *(number // n for n in low)} if n <= most)


def spread_divisors(number: int, most: int) -> list[int]:
    """Return the divisors of a number up to `most`.

    Of more than `_MOST_DIVISORS` they are those that are nearest to the powers of the root of two,
    and the largest.
    """
    every = divisors(number, most)
    if len(every) <= _MOST_DIVISORS:
        return every
    powers = [2 ** (k / 2) for k in range(2 * every[-1].bit_length())]
    nearest = {min(every, key=lambda n: max(n / power, power / n)) for power in powers}
    return sorted({*nearest, every[-1]})
