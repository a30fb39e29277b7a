"""Stages that end a layer earlier or later than the search's joined layers let them. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from launcher.partition.assignment import Assignment
from launcher.plan.inter_op.climb import climbed
from launcher.plan.inter_op.problem import Problem
from launcher.plan.pipeline import Estimate


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
    return climbed(assignment, estimate, whole, _moves, [_evened(assignment)])


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
