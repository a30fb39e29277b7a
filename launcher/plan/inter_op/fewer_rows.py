"""A slightly smaller batch that would take much less time a row, where there is one. Pure."""

from __future__ import annotations

import dataclasses
import math

from launcher.plan.errors import UnmeasuredError
from launcher.plan.inter_op.estimate import make_estimate
from launcher.plan.inter_op.problem import Constraints, Problem, best_of, of_batch
from launcher.plan.pipeline import Estimate

_MOST_FEWER = 0.1  # of the rows
_LEAST_GAIN = 0.1  # of the time of a row


def fewer_rows_note(problem: Problem, wanted: Constraints, plan: Estimate) -> tuple[str, ...]:
    """Return a note that names a batch of fewer rows and what a step of it takes; or none.

    A batch is tried that all devices can share, unless the one that is asked for is such a batch.
    Its plan is the best of a search by the closed form alone, so that it may be better yet.

    Args:
        problem: the problem of the batch that is asked for.
        wanted: what the user fixed.
        plan: the estimate of the plan that was found.
    """
    rows, devices = problem.batch_size, problem.cluster.num_devices
    fewer = rows - rows % devices
    if not problem.sliced or fewer == rows or fewer < (1 - _MOST_FEWER) * rows:
        return ()
    smaller = dataclasses.replace(of_batch(problem, fewer), refused=frozenset())
    best = math.inf
    for candidate in best_of(smaller, wanted):
        try:
            estimate = make_estimate(candidate.assignment, smaller)
        except UnmeasuredError:
            continue
        needed = max(stage.memory_bytes for stage in estimate.stages)
        if needed <= (problem.memory_bytes or math.inf):
            best = min(best, estimate.predicted_step_seconds)
    saved = 1 - (best / fewer) / (plan.predicted_step_seconds / rows)
    if saved <= _LEAST_GAIN:
        return ()
    return (
        f"a global batch of {fewer} instead of {rows} rows would take {_milliseconds(best)} a step "
        f"({saved:.0%} less per row), since all {devices} devices can share it",
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
