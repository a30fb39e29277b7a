"""What is fixed for one run of the stage search. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.partition.reduction import DEFAULT_REDUCTION, Reduction


@dataclass(frozen=True)
class Setting:
    """What is fixed for one run of the stage search.

    Attributes:
        num_micro_batches: number of microbatches a step.
        batch_size: rows of the whole batch.
        replicas: number of replicas that all stages have in common.
        schedule: name of the schedule.
        remats: the words for rematerialisation to choose from; `FEWEST` is one, too.
        memory_bytes: memory of a device; None: no limit.
        reduction: how gradients are summed over the replicas.
    """

    num_micro_batches: int
    batch_size: int
    replicas: int
    schedule: str
    remats: tuple[str, ...]
    memory_bytes: float | None
    reduction: Reduction = DEFAULT_REDUCTION
