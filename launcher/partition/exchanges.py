"""List what the workers of a step sum or gather through parameter servers. Pure.

A worker runs its share of the replicas as data parallelism does, and sums their gradients first.
What is left to exchange are the buckets of gradients, the results of the loss, a row for each
replica, and the batch leaves that the rest of the step reads whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.partition.gradient_sync import Bucket
from launcher.partition.partitioned import PartitionedStep
from launcher.trace.ir.jaxpr import Var, nbytes


@dataclass(frozen=True)
class Exchanged:
    """Values that cross together.

    Attributes:
        when: "before": the batch's leaves, before the step; "update": what its loss makes.
        kind: "sum" or "gather".
        values: of every value its part, of all replicas where they are gathered, or batch leaf.
        dtype: the type in which they cross.
        nbytes: bytes of one worker's part.
    """

    when: str
    kind: str
    values: tuple[Var, ...]
    dtype: str
    nbytes: int


def exchanges(cut: PartitionedStep, once: Sequence[Bucket]) -> tuple[Exchanged, ...]:
    """Return what workers exchange in a step, in order; nothing where there is one.

    Args:
        cut: the partitioned step, of one stage.
        once: the buckets of gradients that are summed once a step.
    """
    workers, update = cut.slicing.workers, cut.update
    if workers == 1:
        return ()
    leaves = [v for v, _ in update.given if v not in cut.step.constants]
    results = [v for parts in update.result_parts.values() for v in parts]
    grads = {i: v for (i, _), (v,) in update.grad_parts.items()}
    sums = [
        Exchanged("update", "sum", tuple(grads[i] for i in b.operands), b.dtype, b.nbytes)
        for b in once
    ]
    return (
        *_gathered("before", [v for v in leaves if v.aval.shape], workers),
        *sums,
        *_gathered("update", results, workers),
    )


def _gathered(when: str, values: Sequence[Var], workers: int) -> list[Exchanged]:
    """Return values that cross in one message, as bytes, whatever their types."""
    size = sum(nbytes(v.aval) for v in values) // workers
    return [Exchanged(when, "gather", tuple(values), "uint8", size)] if values else []


def shared_out(sizes: Sequence[int], servers: int) -> tuple[int, ...]:
    """Return the server of each exchange: the largest first, each to the one with least so far.

    No server has more than the mean and the largest exchange.

    Args:
        sizes: the bytes of each exchange.
        servers: the number of servers.
    """
    loads, found = [0] * servers, [0] * len(sizes)
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        found[k] = min(range(servers), key=lambda server: loads[server])
        loads[found[k]] += sizes[k]
    return tuple(found)
