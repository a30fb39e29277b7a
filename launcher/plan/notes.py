"""Notes on a plan: what a person should know of it, beside its numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.base import parse_remat
from launcher.partition import (
    MODEL,
    ROWS,
    PartitionedStep,
    RematSegment,
    StageGraph,
    keeps,
    own_layers,
    segments,
)
from launcher.trace import BatchError, leaf_names, source_line


def plan_notes(cut: PartitionedStep, no_gradient: str | None) -> tuple[str, ...]:
    """Return notes on the plan.

    They say what is computed on the whole batch, which parameters get no gradient, which
    rematerialisation saves nothing, what workers gather for it, and what every device of a submesh
    computes since no rule says how to cut it.
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
    return (*loss, *in_vain, *_without_effect(cut), *_gathered(cut), *sorted(unknown))


def _without_effect(cut: PartitionedStep) -> list[str]:
    """Return which stages' rematerialisation changes nothing, and why, in words."""
    found: dict[tuple[str, str], list[int]] = {}
    for graph in cut.stages if cut.loss.wrt else ():
        remat = cut.assignment.remat[graph.index]
        ours = [one for one in segments(graph.layers, remat) if one.policy is not None]
        if reason := _why_in_vain(graph, ours, remat, cut.goes_back_at_once(graph.index)):
            found.setdefault((remat, reason), []).append(graph.index)
    return [
        f"remat={remat} saves nothing in stage{'s' if stages[1:] else ''} "
        f"{', '.join(map(str, stages))}: {reason}"
        for (remat, reason), stages in found.items()
    ]


def _why_in_vain(
    graph: StageGraph, ours: Sequence[RematSegment], remat: str, goes_back_at_once: bool
) -> str:
    """Return why a stage's rematerialisation changes nothing; "" if it does, or if there is none.

    Args:
        graph: the stage.
        ours: what it recomputes together.
        remat: its remat string.
        goes_back_at_once: whether its backward pass directly follows its forward pass.
    """
    if parse_remat(remat).policy == "none":
        return ""
    if own_layers(graph.layers) == len(graph.layers):
        return "the model checkpoints each of its layers itself"
    every = ((one.policy, eqn) for one in ours for eqn in one.equations)
    if all(keeps(policy, eqn) for policy, eqn in every if policy):
        return "it keeps all that is computed"
    if goes_back_at_once and len(ours) == 1 and len(graph.layers) == parse_remat(remat).layers:
        return (
            "its backward pass follows at once, and computes all of it again together; mark more "
            "layers, or take fewer together"
        )
    return ""


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
