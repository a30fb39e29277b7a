"""The plans that are worth trying beside the best one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from launcher.partition.assignment import Assignment
from launcher.plan.build import PlanBuilder
from launcher.plan.inter_op.found import Estimated
from launcher.plan.plan import Plan
from launcher.plan.words import describe_plan
from launcher.trace.errors import BatchError

_MOST = 2.0  # times the best plan's step: further off no prediction is
_NEAR = 1.25  # times the best prediction: plans of other kinds that are tried first
_SPARE = 2  # times as many are built at most, as some do not fit or cannot cut the batch


def next_best(
    builder: PlanBuilder,
    best: Plan,
    chosen: Estimated,
    built: Sequence[tuple[Plan, Estimated]],
    ranked: Sequence[Estimated],
    count: int,
) -> list[tuple[Plan, Assignment]]:
    """Return up to `count` other plans that fit, each with its assignment, best first.

    No two are the same in words. Predictions err alike for plans with as many stages, and for those
    on the same submeshes: the best with other numbers of submeshes come first, as far as their
    predictions are near, then the best on other ones, then the next best.

    Args:
        builder: builds plans.
        best: the best plan.
        chosen: its estimate.
        built: the plans that are built already, with their estimates.
        ranked: the estimates of all plans, best first.
        count: the most plans to return.
    """
    known = {estimate[0]: plan for plan, estimate in built}
    found: list[tuple[Plan, Assignment]] = []
    for k, (assignment, _) in enumerate(_by_kind(chosen, ranked)):
        if len(found) == count or k == _SPARE * count:
            break
        try:
            plan = known.get(assignment) or builder.build(assignment)
        except BatchError:
            continue
        near = plan.predicted_step_seconds <= _MOST * best.predicted_step_seconds
        if plan.missing_bytes <= 0 and near:
            found.append((plan, assignment))
    return sorted(found, key=lambda pair: pair[0].predicted_step_seconds)


def _by_kind(chosen: Estimated, ranked: Sequence[Estimated]) -> Iterator[Estimated]:
    """Yield estimates that differ in words from the chosen one, the best of each kind first."""
    near = _NEAR * chosen[1].predicted_step_seconds
    words, counts, kinds = {describe_plan(chosen[1])}, {_num_meshes(chosen)}, {_kind(chosen)}
    others: list[Estimated] = []
    for estimate in ranked:
        if (text := describe_plan(estimate[1])) in words:
            continue
        words.add(text)
        if _num_meshes(estimate) in counts or estimate[1].predicted_step_seconds > near:
            others.append(estimate)
            continue
        counts.add(_num_meshes(estimate))
        kinds.add(_kind(estimate))
        yield estimate
    later: list[Estimated] = []
    for estimate in others:
        if _kind(estimate) in kinds:
            later.append(estimate)
            continue
        kinds.add(_kind(estimate))
        yield estimate
    yield from later


def _num_meshes(estimate: Estimated) -> int:
    return len(estimate[1].meshes)


def _kind(estimate: Estimated) -> tuple[int, ...]:
    """Return the number of devices of every stage."""
    return tuple(math.prod(stage.logical_mesh) for stage in estimate[1].stages)
