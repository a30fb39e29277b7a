"""Exchanges of workers through parameter servers: their record in a plan, and their cost. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from launcher.hardware import ClusterShape
from launcher.partition import Bucket, Exchanged, PartitionedStep, Reduction, exchanges, shared_out
from launcher.plan.stage_plan import ServerExchange


def server_exchanges(cut: PartitionedStep, once: Sequence[Bucket]) -> tuple[ServerExchange, ...]:
    """Return what workers exchange, shared out over the servers.

    Args:
        cut: the partitioned step.
        once: the buckets of gradients that are summed once a step.
    """
    found, by = exchanges(cut, once), cut.assignment.reduction
    numbers = itertools.count()
    told = [ServerExchange(_name(x, numbers), x.when, x.kind, x.dtype, x.nbytes) for x in found]
    owners = shared_out([x.whole_bytes(by.workers) for x in told], by.servers)
    pairs = zip(told, owners, strict=True)
    return tuple(dataclasses.replace(x, server=server) for x, server in pairs)


def exchange_seconds(
    exchanges: Sequence[ServerExchange], by: Reduction, cluster: ClusterShape
) -> float:
    """Return the seconds of a step's exchanges: of the batch's rows, and of what the loss makes.

    Each goes from the workers to its server and back, one behind the other: a worker puts one
    while a server adds another, and fetches a third. The backward pass hides none of it, since all
    results of a program are ready together.
    """
    total, latency = 0.0, cluster.store_latency / 2  # of either way
    for when in ("before", "update"):
        put = got = 0.0
        busy = [0.0] * by.servers
        for x in exchanges:
            if x.when == when:
                put += latency + x.bytes / cluster.store_put
                added = max(put, busy[x.server]) + by.workers * x.bytes / cluster.store_add
                busy[x.server] = added
                got = max(got, added) + latency + x.whole_bytes(by.workers) / cluster.store_get
        total += got
    return total


def _name(x: Exchanged, numbers: itertools.count[int]) -> str:
    """Return what crosses in words; `numbers`: those of the buckets to come."""
    if x.kind == "sum":
        return f"bucket {next(numbers)} of gradients"
    return "rows of the batch" if x.when == "before" else "results of the loss"
