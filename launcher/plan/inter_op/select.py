"""Selection of one plan among the search's assignments, with what it was better than."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from launcher.base import parse_remat
from launcher.hardware import ClusterShape
from launcher.partition import Assignment
from launcher.plan.build import PlanBuilder, refused_notes
from launcher.plan.further import lead_of
from launcher.plan.inter_op.estimate import make_estimate
from launcher.plan.inter_op.explain import (
    fewer_examples_note,
    leanest,
    next_best,
    nothing_fits,
    runners_up,
)
from launcher.plan.inter_op.layer_construction import make_problem
from launcher.plan.inter_op.problem import Constraints, Problem
from launcher.plan.inter_op.refine import Estimated, SearchResult, fewest_again, ungrouped
from launcher.plan.inter_op.search import find_plans, plans_on_one_machine
from launcher.plan.plan import Plan, TooLargeError
from launcher.plan.profile.measure_layers import MeasuredLayers, UnmeasuredError
from launcher.plan.stage_plan import describe_plan
from launcher.trace import BatchError, JoinedError, TracedStep

_MOST_BUILT = 3  # of those that fit
# Estimates of memory are a few percent off without rematerialisation, and up to a fifth too low
# with it. So a plan that was taken to fit may not.
_SEARCHES = 3  # at most: the next where nothing that was built fits
_MARGIN = 0.98  # of the memory that the next one gets
_REFITS = 3  # at most, of what a plan recomputes
_PRECISION = 1.002  # relative error of an estimate's seconds: plans within it are not distinguished


def search(
    step: TracedStep,
    cluster: ClusterShape,
    wanted: Constraints,
    progress: Callable[[float], None] = lambda share: None,
    measured: MeasuredLayers | None = None,
    how_many: Callable[[Plan], int] = lambda best: 1,
) -> list[tuple[Plan, Assignment]]:
    """Return the best plan, with the next best ones as its `runners_up`, and its assignment.

    If more are asked for, plans follow that are worth trying beside it (`next_best`).

    Of a step with several losses it is the plan of the leading one (`plan.further`), which cuts the
    batch as all of them can be cut.

    Assignments are estimated, so that the simulated timeline decides (`search`). The best of the
    estimates are built, until one fits the memory and no other promises to be faster.

    Args:
        step: the traced step, cut into layers.
        cluster: the devices to plan for.
        wanted: what the user fixed.
        progress: called with the share that is done, 0 … 1.
        measured: the layers' measured seconds, instead of the cost model's.
        how_many: returns how many plans to return, given the best.

    Raises:
        PlanError: nothing fits the devices' memory, or nothing that does could be measured.
        BatchError: no plan that was found can cut the batch as it says.
    """
    lead = lead_of(step)
    builder = PlanBuilder(lead, cluster, measured, beside=step.parts)
    problem = make_problem(lead, cluster, measured, wanted.num_stages, builder.outer_dims)
    built: list[tuple[Plan, Estimated]] = []
    refused: dict[int, BatchError] = {}
    most = cluster.memory_bytes or math.inf
    memory_searches = 0
    while memory_searches < _SEARCHES:
        found = _find(problem, wanted, lambda share: progress(0.8 * share))
        estimates = found.ranked
        if not estimates and not built and not refused:
            return [_leanest(builder, problem, wanted)]
        if not estimates:
            break
        tried, refusals = _build(
            builder, estimates, most, lambda: progress(0.9), None if wanted.remat else problem
        )
        built, refused = tried or built, refused | refusals
        if problem.sliced and any(isinstance(error, JoinedError) for error in refusals.values()):
            problem = dataclasses.replace(problem, sliced=False)
            continue
        if not tried:
            problem = dataclasses.replace(problem, refused=problem.refused | refusals.keys())
            continue
        if any(plan.missing_bytes <= 0 for plan, _ in built):
            best, chosen = _selected(built, found, refused)
            rows = fewer_examples_note(problem, wanted, chosen[1])
            best = dataclasses.replace(best, notes=(*best.notes, *rows))
            more = how_many(best) - 1
            if more <= 0:
                return [(best, chosen[0])]
            estimates = _of_every_depth(
                problem, wanted, estimates, lambda share: progress(0.9 + 0.1 * share)
            )
            return [(best, chosen[0]), *next_best(builder, best, chosen, built, estimates, more)]
        problem = _with_less_memory(problem, built)
        memory_searches += 1
    if built:
        raise _too_large(built)
    raise next(iter(refused.values()))


def _leanest(
    builder: PlanBuilder, problem: Problem, wanted: Constraints
) -> tuple[Plan, Assignment]:
    """Return the plan that needs the least memory, which the search takes for too large.

    Raises:
        PlanError: it is.
    """
    least, plan = leanest(problem, wanted), None
    if least is not None:
        with suppress(BatchError, UnmeasuredError):
            plan = builder.build(least.assignment)
            if plan.missing_bytes <= 0:
                return plan, least.assignment
    raise nothing_fits(problem, wanted, least, plan)


def _find(problem: Problem, wanted: Constraints, progress: Callable[[float], None]) -> SearchResult:
    """Return the best plans by their simulated timelines; none where nothing fits.

    Raises:
        UnmeasuredError: the layers of none could be measured.
    """
    if problem.cluster.shares_machine:
        found = plans_on_one_machine(problem, wanted, progress)
    else:
        found = find_plans(problem, wanted, progress)
    if found.unmeasured and not found.estimates:
        raise found.unmeasured[0]
    return found


def _of_every_depth(
    problem: Problem,
    wanted: Constraints,
    ranked: Sequence[Estimated],
    progress: Callable[[float], None],
) -> list[Estimated]:
    """Return the estimates with the best pipelines of 2, 4, 8 … submeshes where there are none."""
    depths = {len(estimate.meshes) for _, estimate in ranked}
    most = min(problem.cluster.num_devices, len(problem.groups))
    missing = [n for n in (2**k for k in range(1, most.bit_length())) if n not in depths]
    found = list(ranked)
    for k, count in enumerate(missing if wanted.num_stages is None else ()):
        with suppress(UnmeasuredError):
            progress(k / len(missing))
            given = dataclasses.replace(wanted, num_stages=count)
            deeper = _find(problem, given, lambda share: None)
            found += deeper.ranked[:1] if deeper.estimates else []
    return sorted(found, key=lambda one: one[1].predicted_step_seconds)


def _selected(
    built: Sequence[tuple[Plan, Estimated]], found: SearchResult, refused: Mapping[int, BatchError]
) -> tuple[Plan, Estimated]:
    """Return the best of the plans that fit, with the next best ones, and its estimate.

    What was only estimated is compared with the best one's estimate, the bound included: in seconds
    it is as far below the plan's own prediction as it was proved to be below its estimate.
    """
    fitting = [pair for pair in built if pair[0].missing_bytes <= 0]
    best, chosen = min(fitting, key=lambda pair: pair[0].predicted_step_seconds)
    scale = best.predicted_step_seconds / chosen[1].predicted_step_seconds
    least = found.least_seconds and found.least_seconds * scale
    plan = dataclasses.replace(
        best,
        runners_up=runners_up(best, chosen, built, found.ranked),
        least_step_seconds=least and min(least, best.predicted_step_seconds),
        notes=(*best.notes, *refused_notes(refused)),
    )
    return plan, chosen


def _build(
    builder: PlanBuilder,
    estimates: Sequence[Estimated],
    most: float,
    progress: Callable[[], None],
    problem: Problem | None,
) -> tuple[list[tuple[Plan, Estimated]], dict[int, BatchError]]:
    """Build the most promising plans, until one fits the memory and none promises to be faster.

    Args:
        builder: builds plans.
        estimates: the estimates, best first.
        most: the bytes of a device.
        progress: called after each.
        problem: the problem, if what a plan recomputes may be changed so that it fits.

    Returns:
        The plans, and why the batch cannot be cut into a number of slices, by that number.
    """
    built: list[tuple[Plan, Estimated]] = []
    refused: dict[int, BatchError] = {}
    large: list[Estimated] = []  # not expected to fit: only for where nothing else does

    def attempt(estimate: Estimated) -> None:
        num_slices = estimate[0].slicing.num_slices
        try:
            if num_slices not in refused:
                built.append((builder.build(estimate[0]), estimate))
                for _ in range(_REFITS if problem else 0):
                    if built[-1][0].missing_bytes <= 0:
                        break
                    assert problem is not None
                    leaner = _leaner(*built[-1], problem)
                    if leaner is None:
                        break
                    built.append((builder.build(leaner[0]), leaner))
        except BatchError as error:
            refused[num_slices] = error
        progress()

    for estimate in estimates:
        if _settled(built, estimate):
            break
        if built and _expected_bytes(estimate, built) > most:
            large.append(estimate)
            continue
        attempt(estimate)
    for estimate in large:
        if any(plan.missing_bytes <= 0 for plan, _ in built):
            break
        attempt(estimate)
    return built, refused


def _leaner(plan: Plan, of: Estimated, problem: Problem) -> Estimated | None:
    """Return a plan that was built with more layers recomputed, and its estimate.

    They are as many as make up for what the estimate of each stage's memory was too low by. None:
    they do not suffice.
    """
    assignment, estimate = of
    most = problem.cluster.memory_bytes or math.inf
    allowed = [
        float(said.memory_bytes)
        if stage.memory_bytes <= most
        else _MARGIN * most * said.memory_bytes / stage.memory_bytes
        for said, stage in zip(estimate.stages, plan.stages, strict=True)
    ]
    whole = ungrouped(problem)
    leaner = fewest_again(assignment, whole, allowed)
    if leaner is None or leaner == assignment:
        return None
    return leaner, make_estimate(leaner, whole)


def _expected_bytes(estimate: Estimated, built: Sequence[tuple[Plan, Estimated]]) -> float:
    """Return the bytes that a plan is expected to need on a device.

    Estimates with the same rematerialisation are taken to be too low by as much as the worst of
    those that were built. A build costs a hundred estimates.
    """
    alike = [
        (plan.most_bytes, one[1].most_bytes)
        for plan, one in built
        if _policies(one) == _policies(estimate)
    ]
    short = max((needed / said for needed, said in alike if said), default=1.0)
    return estimate[1].most_bytes * max(1.0, short)


def _policies(of: Estimated) -> set[str]:
    """Return the policies of rematerialisation, of however many layers."""
    words = map(parse_remat, of[0].remat)
    return {policy for word in words for policy in (word.policy, word.rest)}


def _settled(built: Sequence[tuple[Plan, Estimated]], after: Estimated) -> bool:
    """Return whether a plan that was built fits, and no further estimate promises to be better."""
    fitting = [plan.predicted_step_seconds for plan, _ in built if plan.missing_bytes <= 0]
    promised = after[1].predicted_step_seconds
    enough = len(built) >= _MOST_BUILT
    return bool(fitting) and (enough or min(fitting) <= promised * _PRECISION)


def _with_less_memory(problem: Problem, built: Sequence[tuple[Plan, Estimated]]) -> Problem:
    """Return the problem with less memory, by as much as the search underestimated the plans."""
    assert problem.memory_bytes is not None
    assert problem.cluster.memory_bytes is not None
    share = max(said.most_bytes / plan.most_bytes for plan, (_, said) in built)
    least = min(problem.memory_bytes, share * problem.cluster.memory_bytes)
    return dataclasses.replace(problem, memory_bytes=_MARGIN * least)


def _too_large(built: Sequence[tuple[Plan, Estimated]]) -> TooLargeError:
    least, (assignment, _) = min(built, key=lambda pair: pair[0].most_bytes)
    needed, there = least.most_bytes / 2**30, least.cluster["memory_bytes"] / 2**30
    return TooLargeError(
        f"the model does not fit: the leanest plan found ({describe_plan(least)}) needs "
        f"{needed:.2f} GiB a device, {needed - there:.2f} GiB more than its {there:.2f} GiB. Use "
        "more devices (cluster.hosts, cluster.gpus), or a smaller train.global_batch_size",
        assignment,
    )
