"""Notes on a plan: what a person should know of it, beside its numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.partition.partitioned import PartitionedStep
from launcher.partition.sharding.layout import MODEL, ROWS
from launcher.trace.errors import BatchError
from launcher.trace.jaxpr import source_line
from launcher.trace.leaf_names import leaf_names


def plan_notes(cut: PartitionedStep, no_gradient: str | None) -> tuple[str, ...]:
    """Return notes on the plan.

    They say what is computed on the whole batch, which parameters get no gradient, what workers
    gather for it, and what every device of a submesh computes since no rule says how to cut it.
    """
    shared = [layout for layout in cut.layouts if layout.sizes[MODEL] * layout.sizes[ROWS] > 1]
    unknown = {
        f"{use.eqn.primitive.name} at {source_line(use.eqn)} is not cut: every device of a submesh "
        "computes it whole"
        for layout in shared[:1]
        for use in layout.loss_dims.uses
        if use.factors is None
    }
    loss = [f"loss: {cut.loss.meaning}"] if cut.loss.from_whole_batch else []
    in_vain = [no_gradient] if no_gradient else []
    return (*loss, *in_vain, *_gathered(cut), *sorted(unknown))


def _gathered(cut: PartitionedStep) -> list[str]:
    """Return what workers with parameter servers gather of the batch, in words."""
    if cut.slicing.workers == 1:
        return []
    names = dict(zip(cut.step.invars, leaf_names(cut.step), strict=True))
    whole = [names[v] for v, _ in cut.update.given if v in names and v.aval.shape]
    if not whole:
        return []
    return [f"workers gather all rows of the batch's {', '.join(whole)}: the step reads them whole"]


def refused_notes(refused: Mapping[int, BatchError]) -> tuple[str, ...]:
    """Return what to say of numbers of slices of the batch that fell out of the search, if any."""
    if not refused:
        return ()
    _, error = min(refused.items())
    words = ", ".join(map(str, sorted(refused)))
    return (f"not into {words} slices (microbatches × replicas): {error}",)
