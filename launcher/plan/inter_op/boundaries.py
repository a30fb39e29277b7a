"""Stages that end a layer earlier or later than the search's joined layers let them. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from launcher.partition.assignment import Assignment
from launcher.plan.errors import UnmeasuredError
from launcher.plan.inter_op.estimate import make_estimate
from launcher.plan.inter_op.problem import Problem
from launcher.plan.pipeline import Estimate

_MOST_TASKS = 60_000  # of all simulated timelines
_LEAST_GAIN = 1e-4  # of the step, for a move to be made


def with_moved_boundaries(
    assignment: Assignment, estimate: Estimate, problem: Problem
) -> tuple[Assignment, Estimate]:
    """Return the plan with its stages' ends moved a layer at a time, as long as it gets faster.

    The search joins neighbouring layers where there are many, so that a stage may be a layer too
    long. Where it does not, and where no move helps, the plan is returned as it was given.
    """
    if problem.unjoined is None or len(assignment.layers) == 1:
        return assignment, estimate
    layers = tuple((i,) for i in range(problem.unjoined.num_layers))
    whole = dataclasses.replace(problem, table=problem.unjoined, groups=layers, unjoined=None)
    left = _MOST_TASKS // (2 * len(assignment.layers) * assignment.num_micro_batches)
    moving = True
    moves: Iterator[Assignment] = itertools.chain([_evened(assignment)], _moves(assignment))
    while moving:
        moving = False
        for moved in itertools.islice(moves, max(left, 0)):
            left -= 1
            try:
                other = make_estimate(moved, whole)
            except UnmeasuredError:
                continue
            needed = max(stage.memory_bytes for stage in other.stages)
            most = (1 - _LEAST_GAIN) * estimate.predicted_step_seconds
            if needed > (problem.memory_bytes or math.inf) or other.predicted_step_seconds > most:
                continue
            assignment, estimate, moving = moved, other, True
            moves = _moves(assignment)
            break
    return assignment, estimate


def _evened(assignment: Assignment) -> Assignment:
    """Return the assignment with stages of as equal numbers of layers as can be."""
    stages = len(assignment.layers)
    every = [layer for layers in assignment.layers for layer in layers]
    ends = [round(len(every) * s / stages) for s in range(stages + 1)]
    layers = tuple(tuple(every[first:end]) for first, end in itertools.pairwise(ends))
    return dataclasses.replace(assignment, layers=layers)


def _moves(assignment: Assignment) -> Iterator[Assignment]:
    """Yield the assignments in which one stage gives a neighbour its nearest layer."""
    layers = assignment.layers
    for s, ((*before,), (*after,)) in enumerate(itertools.pairwise(layers)):
        for one, other in (
            (before[:-1], [before[-1], *after]),
            ([*before, after[0]], after[1:]),
        ):
            if one and other:
                pair = tuple(one), tuple(other)
                yield dataclasses.replace(assignment, layers=(*layers[:s], *pair, *layers[s + 2 :]))
