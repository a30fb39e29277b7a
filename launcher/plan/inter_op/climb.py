"""Hill climbing from a plan that was found: a decision at a time, as long as it gets faster. Pure.

Whether a plan fits the memory is asked before its timeline is simulated, which takes far longer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from launcher.partition.assignment import Assignment
from launcher.plan.errors import UnmeasuredError
from launcher.plan.inter_op.estimate import make_pipeline
from launcher.plan.inter_op.problem import Problem
from launcher.plan.pipeline import Estimate, estimated

_MOST_TASKS = 60_000  # of all simulated timelines
_LEAST_GAIN = 1e-4  # of the step, for a move to be made


def climbed(
    assignment: Assignment,
    estimate: Estimate,
    problem: Problem,
    moves: Callable[[Assignment], Iterator[Assignment]],
    first: Iterable[Assignment] = (),
) -> tuple[Assignment, Estimate]:
    """Return the plan that no move makes faster, with its estimate.

    Args:
        assignment: the plan to begin with.
        estimate: its estimate.
        problem: the problem.
        moves: yields the plans that are one move away from a plan.
        first: plans that are tried before.
    """
    left = _MOST_TASKS
    upcoming: Iterator[Assignment] = itertools.chain(first, moves(assignment))
    while (moved := next(upcoming, None)) is not None and left > 0:
        try:
            pipeline = make_pipeline(moved, problem)
        except UnmeasuredError:
            continue
        needed = max(stage.memory_bytes for stage in pipeline.stages)
        if needed > (problem.memory_bytes or math.inf):
            continue
        left -= 2 * len(moved.layers) * moved.num_micro_batches
        other = estimated(pipeline)
        if other.predicted_step_seconds <= (1 - _LEAST_GAIN) * estimate.predicted_step_seconds:
            assignment, estimate, upcoming = moved, other, moves(moved)
    return assignment, estimate


def with_less_again(assignment: Assignment) -> Iterator[Assignment]:
    """Yield the plans in which one stage more computes nothing again."""
    remat = assignment.remat
    for s, word in enumerate(remat):
        if word != "none":
            yield dataclasses.replace(assignment, remat=(*remat[:s], "none", *remat[s + 1 :]))
