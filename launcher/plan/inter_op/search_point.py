"""The values held fixed during one stage search. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.partition import DEFAULT_REDUCTION, Reduction


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
