"""Hill climbing from a plan that was found: a decision at a time, as long as it gets faster. Pure.

Whether a plan fits the memory is asked before its timeline is simulated, which takes far longer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from launcher.partition.assignment import Assignment
from launcher.plan.errors import UnmeasuredError
from launcher.plan.inter_op.estimate import grouped_layers, make_pipeline
from launcher.plan.inter_op.problem import Problem
from launcher.plan.inter_op.recompute import NOTHING, Recompute
from launcher.plan.pipeline import Estimate, estimated
from launcher.plan.stage_plan import StagePlan

_MOST_TASKS = 60_000  # of all simulated timelines
_LEAST_GAIN = 1e-4  # of the step, for a move to be made
_ROUNDING = 1e-9  # relative, of sums in another order


def climbed(
    assignment: Assignment,
    estimate: Estimate,
    problem: Problem,
    moves: Callable[[Assignment], Iterator[Assignment]],
    first: Iterable[Assignment] = (),
    refit: bool = False,
) -> tuple[Assignment, Estimate]:
    """Return the plan that no move makes faster, with its estimate.

    Args:
        assignment: the plan to begin with.
        estimate: its estimate.
        problem: the problem.
        moves: yields the plans that are one move away from a plan.
        first: plans that are tried before.
        refit: whether each plan is tried with as few layers computed again as fit (`fewest_again`).
    """
    left = _MOST_TASKS
    upcoming: Iterator[Assignment] = itertools.chain(first, moves(assignment))
    while (moved := next(upcoming, None)) is not None and left > 0:
        try:
            fitted = fewest_again(moved, problem) if refit else moved
            if fitted is None:
                continue
            moved, pipeline = fitted, make_pipeline(fitted, problem)
        except UnmeasuredError:
            continue
        needed = max(stage.memory_bytes for stage in pipeline.stages)
        if needed > (problem.memory_bytes or math.inf):
            continue
        if moved == assignment:
            continue
        left -= 2 * len(moved.layers) * moved.num_micro_batches
        most = (1 - _LEAST_GAIN) * estimate.predicted_step_seconds
        if not problem.cluster.shares_machine and pipeline.busy_seconds > most * (1 + _ROUNDING):
            continue  # whatever its timeline is: one device works longer
        other = estimated(pipeline)
        if other.predicted_step_seconds <= most:
            assignment, estimate, upcoming = moved, other, moves(moved)
    return assignment, estimate


def fewest_again(
    assignment: Assignment, problem: Problem, memory: Sequence[float] | None = None
) -> Assignment | None:
    """Return the assignment with as little computed again as fits the memory; None: nothing fits.

    Of each stage these are the first layers in full, and the others selectively if that is faster.
    Stages on one submesh are decided one after another, those on others at once, each by bisection.

    Args:
        assignment: the assignment; what its stages compute again is not kept.
        problem: the problem.
        memory: the bytes that each stage may take; by default what a device has.

    Raises:
        UnmeasuredError: a layer could not be measured.
    """
    most = memory or [problem.memory_bytes or math.inf] * len(assignment.layers)
    groups, together = grouped_layers(assignment, problem), len(assignment.submeshes)
    lengths = [len(of) for of in groups]

    def recomputing(every: Sequence[Recompute]) -> Assignment:
        remat = tuple(one.remat(of) for one, of in zip(every, groups, strict=True))
        return dataclasses.replace(assignment, remat=remat)

    def stages(every: Sequence[Recompute]) -> Sequence[StagePlan]:
        return make_pipeline(recomputing(every), problem).stages

    def fits(every: Sequence[Recompute]) -> list[bool]:
        return [stage.memory_bytes <= of for stage, of in zip(stages(every), most, strict=True)]

    if all(fits(nothing := [NOTHING] * len(groups))):
        return recomputing(nothing)
    if not all(fits([Recompute(length) for length in lengths])):
        return None
    ladders = [[Recompute(full) for full in range(length + 1)] for length in lengths]
    found = _least(ladders, fits, together)
    if problem.table.selective:
        mixed = [[Recompute(full, True) for full in range(length)] for length in lengths]
        other = _least(
            [[NOTHING, *one, of[-1]] for one, of in zip(mixed, ladders, strict=True)],
            fits,
            together,
        )
        times = [
            [stage.forward_seconds + stage.backward_seconds for stage in stages(every)]
            for every in (found, other)
        ]
        for mesh in range(together):
            of_mesh = slice(mesh, None, together)
            if sum(times[1][of_mesh]) < sum(times[0][of_mesh]):
                found[of_mesh] = other[of_mesh]
    return recomputing(found)


def _least(
    ladders: Sequence[Sequence[Recompute]],
    fits: Callable[[Sequence[Recompute]], list[bool]],
    together: int,
) -> list[Recompute]:
    """Return the first rung of each stage's ladder with which the stage fits; the last ones fit.

    Args:
        ladders: the recomputations of each stage, by how little memory they need.
        fits: returns which stages fit.
        together: how many stages are decided at once.
    """
    high = [len(ladder) - 1 for ladder in ladders]

    def rungs(at: Sequence[int]) -> list[Recompute]:
        return [ladder[k] for ladder, k in zip(ladders, at, strict=True)]

    for turn in range(0, len(ladders), together):
        low = [-1] * together  # too few
        while True:
            pairs = zip(low, high[turn : turn + together], strict=True)
            open_ones = [s for s, (least, enough) in enumerate(pairs) if enough - least > 1]
            if not open_ones:
                break
            tried = [*high]
            for s in open_ones:
                tried[turn + s] = (low[s] + high[turn + s]) // 2
            fit = fits(rungs(tried))
            for s in open_ones:
                if fit[turn + s]:
                    high[turn + s] = tried[turn + s]
                else:
                    low[s] = tried[turn + s]
    return rungs(high)


def ungrouped(problem: Problem) -> Problem:
    """Return the problem of the step's own layers, none of which are joined."""
    if problem.unjoined is None:
        return problem
    layers = tuple((i,) for i in range(problem.unjoined.num_layers))
    return dataclasses.replace(problem, table=problem.unjoined, groups=layers, unjoined=None)
