"""Cost of gradient buckets, and their entries in a plan. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.partition.buckets import Bucket
from launcher.partition.partitioned import PartitionedStep
from launcher.partition.sharding.layout import DATA, ROWS, Layout
from launcher.plan.cost.collectives import Collective
from launcher.plan.stage_plan import SummedTogether


@dataclass(frozen=True)
class GradientSums:
    """The buckets of a stage, in the order in which they are complete.

    Attributes:
        every: those that every microbatch sums.
        once: those that are summed once a step.
    """

    every: tuple[Bucket, ...]
    once: tuple[Bucket, ...]

    def told(self, names: Sequence[str]) -> tuple[SummedTogether, ...]:
        """Return the buckets in the words of a plan; `names`: those of the loss's operands."""
        return tuple(
            SummedTogether(
                when=when,
                kind=bucket.collective,
                dtype=bucket.dtype,
                tensors=tuple(names[i] for i in bucket.operands),
                bytes=bucket.nbytes,
            )
            for when, buckets in (("backward", self.every), ("update", self.once))
            for bucket in buckets
        )


def gradient_sums(
    cut: PartitionedStep, stage: int, orders: Sequence[Sequence[int]]
) -> GradientSums:
    """Return the sums of a stage's gradients.

    Args:
        cut: the partitioned step.
        stage: the stage.
        orders: for each of its task programs, the operands whose gradients it makes, in the order
            in which it does (`partition.buckets.gradient_order`).
    """
    found = [cut.buckets(stage, order) for order in orders]
    return GradientSums(
        tuple(bucket for every, _ in found for bucket in every),
        tuple(bucket for _, once in found for bucket in once),
    )


def sum_collectives(buckets: Sequence[Bucket], layout: Layout) -> list[Collective]:
    """Return a collective for each bucket; none on a submesh of one replica."""
    if layout.sizes[DATA] == 1:
        return []
    return [
        Collective(b.collective, DATA if b.collective == "all-reduce" else (DATA, ROWS), b.nbytes)
        for b in buckets
    ]
