"""Decisions for single layers, where the search joins some: what a stage computes again, its ends.

Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from launcher.partition.assignment import Assignment
from launcher.plan.inter_op.climb import climbed, ungrouped
from launcher.plan.inter_op.problem import Problem
from launcher.plan.pipeline import Estimate


def by_single_layers(
    assignment: Assignment, estimate: Estimate, problem: Problem, refit: bool
) -> tuple[Assignment, Estimate]:
    """Return the plan with its stages' ends moved a layer at a time, as long as it gets faster.

    The search joins neighbouring layers where there are many, so that a stage may be a layer too
    long, or compute some too many again. Where it does not, and where no move helps, the plan is
    returned as it was given.

    Args:
        assignment: the plan.
        estimate: its estimate.
        problem: the problem.
        refit: whether it is open which layers are computed again.
    """
    whole, first = ungrouped(problem), [assignment] if refit else []
    if problem.unjoined is None or len(assignment.layers) == 1:
        return climbed(assignment, estimate, whole, lambda of: iter(()), first, refit)
    return climbed(assignment, estimate, whole, _moves, [*first, _evened(assignment)], refit)


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
