"""The search for the plan of the least simulated step, with a lower bound on that of any plan.

Branch and bound over the numbers of microbatches and of common replicas, and the schedules. For
each the stage search gives the best stages by a closed form that no simulated timeline is below;
then come the next best ones, as long as they promise more than the best timeline so far. Pure.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator

import numpy as np

from launcher.partition import Assignment
from launcher.plan.inter_op.interleaved import interleaved_plans
from launcher.plan.inter_op.problem import (
    Constraints,
    Outline,
    Outlines,
    Priced,
    Problem,
    Progress,
    alike_but_replicas,
    best_of,
    candidate_of,
    hidden_forwards,
    price,
    remat_choices,
    settings,
)
from launcher.plan.inter_op.refine import (
    SearchResult,
    equal_stages,
    on_few_devices,
    recounted,
    under_every_schedule,
)
from launcher.plan.inter_op.stage_construction import (
    MOST_UNITS,
    BestStages,
    Crossings,
    best_stages,
    least_cover,
    lower_bound,
    stages_by_objective,
)
from launcher.plan.inter_op.submeshes import SearchPoint, submesh_sizes
from launcher.schedule import DEFAULT_SCHEDULE, SCHEDULES, Schedule

Bounded = tuple[float, Assignment | None]  # neither this nor what comes later is below the seconds

_WORTH_IDLING = 1.03  # times as fast, at least, are plans for which devices of a machine stay idle
_GAP = 5e-4  # relative: a plan that is so near to its bound is not improved
_MOST_TASKS = 150_000  # of all simulated timelines, for what only may be better
_MOST_EXPANDED = 1000  # beginnings of pipelines, of one number of microbatches and schedule
_MOST_CELLS = 50_000_000  # of the tables that tell which are worth it: else the best stages alone


def find_plans(
    problem: Problem, wanted: Constraints, progress: Progress = lambda share: None
) -> SearchResult:
    """Return the best plans and a lower bound; no plans where nothing fits."""
    found = SearchResult(problem, wanted)
    if problem.cluster.hosts > 1:
        # Behind slow links the bounds show late that the other hosts are better left idle.
        alone = find_plans(_on_one_host(problem), wanted)
        for assignment, _ in alone.ranked[:1] if alone.estimates else ():
            found.add(assignment)
    every = enumerate(_branches(found))
    branches = [(bound, k, branch) for k, (bound, branch) in every]
    found.add_equal_stages()
    found.recount()
    heapq.heapify(branches)
    total = len(branches)
    left: list[float] = []  # lower bounds on what was left out
    while branches:
        bound, k, branch = branches[0]
        near = bound >= found.best * (1 - _GAP)
        if near and bound >= found.limit * (1 - _GAP):
            break
        following = next(branch, None)
        spent = bool(found.estimates) and (near or found.tasks > _MOST_TASKS)
        if following is None or (spent and following[1]):
            left.append(max(bound, following[0]) if following else bound)
            heapq.heappop(branches)
            progress(1 - len(branches) / total)
            continue
        heapq.heapreplace(branches, (max(bound, following[0]), k, branch))
        if following[1]:
            found.add(following[1])
    left += [bound for bound, _, _ in branches[:1]]
    found.refine()
    found.least_seconds = min([found.best, *left])
    return found


def plans_on_one_machine(problem: Problem, wanted: Constraints, progress: Progress) -> SearchResult:
    """Return the best plans where devices share a machine, without a bound (`refine`)."""
    found = SearchResult(problem, wanted)
    assignments = [candidate.assignment for candidate in best_of(problem, wanted, progress)]
    for best in assignments[:1]:
        more = recounted(best, problem, wanted)
        assignments = [best, *more, *assignments[1:]]
    for one in (v for given in assignments for v in under_every_schedule(given, problem, wanted)):
        found.add(one)
    if found.estimates:  # on fewer devices nothing fits that does not on all
        limit, on_all = found.best / _WORTH_IDLING, set(found.estimates)
        for one in on_few_devices(problem, wanted):
            found.add(one)
            if one not in on_all and limit < found.seconds_of(one) < math.inf:
                del found.estimates[one]
    found.climb()
    return found


def _branches(found: SearchResult) -> Iterator[tuple[float, Iterator[Bounded]]]:
    """Yield the branches of the search, each with a lower bound."""
    problem, wanted, asked = found.problem, found.wanted, found.wanted.schedule
    others = [
        one
        for one in SCHEDULES.values()
        if one.improves_1f1b and not asked and remat_choices(wanted, one.name)
    ]
    devices = problem.cluster.num_devices
    for alike in alike_but_replicas(settings(problem, wanted, asked or DEFAULT_SCHEDULE)):
        outlines = Outlines(problem, alike[0])
        outlines_under = [Outlines(problem, _under(other, alike[0], wanted)) for other in others]
        for point in alike:
            known = outlines.of(point)
            least = sum(lower_bound(known.tables, devices))
            if problem.cluster.hosts > 1:
                found.equal += equal_stages(problem, point, known)
            if not math.isfinite(least):
                continue
            yield least, _stages(found, point, known)
            taken = least_cover(known.device_seconds)
            for other, every in zip(others, outlines_under, strict=True):
                under = _under(other, point, wanted)
                if other.interleaves:
                    branch = _interleaved(found, under, taken)
                else:
                    branch = _stages_under(found, under, every)
                yield taken / devices, branch


def _under(schedule: Schedule, point: SearchPoint, wanted: Constraints) -> SearchPoint:
    """Return a point under another schedule."""
    remats = remat_choices(wanted, schedule.name)
    return dataclasses.replace(point, schedule=schedule.name, remats=remats)


def _stages_under(found: SearchResult, point: SearchPoint, outlines: Outlines) -> Iterator[Bounded]:
    """Yield plans under a schedule that the point was not outlined for yet."""
    known = outlines.of(point)
    yield sum(lower_bound(known.tables, found.problem.cluster.num_devices)), None
    yield from _stages(found, point, known)


def _stages(found: SearchResult, point: SearchPoint, known: Outline) -> Iterator[Bounded]:
    """Yield plans by their lower bounds, the best stages first."""
    problem, wanted = found.problem, found.wanted
    devices = problem.cluster.num_devices
    priced = price(problem, point, known.useful(devices, found.limit))
    yield sum(lower_bound(priced.tables, devices)), None
    best = best_stages(priced.tables, devices, found.limit, num_stages=wanted.num_stages)
    if best is None:
        yield math.inf, None
        return
    alike = point.schedule != (wanted.schedule or DEFAULT_SCHEDULE)  # for one stage all are

    def bounded(one: BestStages, priced: Priced) -> Bounded:
        assignment = candidate_of(one, priced, point, problem).assignment
        return one.objective, None if alike and len(one.stages) == 1 else assignment

    yield bounded(best, priced)
    every = price(problem, point, known.useful(devices, found.best), beaten=True)
    if every.tables.seconds.size * min(devices, MOST_UNITS) > _MOST_CELLS:
        yield best.objective, None
        return
    following = stages_by_objective(
        every.tables,
        devices,
        lambda: found.best,
        _MOST_EXPANDED,
        wanted.num_stages,
        _crossings(problem, point),
        _round_trips(problem, point),
    )
    for objective, one in following:
        yield bounded(one, every) if one else (objective, None)


def _on_one_host(problem: Problem) -> Problem:
    cluster = dataclasses.replace(problem.cluster, hosts=1)
    sizes = submesh_sizes(cluster, problem.batch_size)
    return dataclasses.replace(problem, cluster=cluster, sizes=sizes, unjoined=None)


def _round_trips(problem: Problem, point: SearchPoint) -> list[int]:
    """Return the round trips that follow a stage's first one, by the number of stages behind."""
    schedule, count = SCHEDULES[point.schedule], point.num_micro_batches
    return [schedule.round_trips(behind, count) for behind in range(problem.depth)]


def _crossings(problem: Problem, point: SearchPoint) -> Crossings | None:
    """Return what crossing hosts costs, if there are several that stages can share."""
    cluster, count = problem.cluster, point.num_micro_batches
    if cluster.hosts == 1 or cluster.devices_per_host == 1:
        return None
    sent = problem.table.of["sent_bytes"].min(0)[:-1] / count
    hidden = np.array(hidden_forwards(problem, point))
    behind = np.minimum(np.arange(problem.table.num_layers + 1), problem.depth - 1)
    sends, local = sent / cluster.inter_host, sent / cluster.intra_host
    return Crossings.of(sends, local, count - 1, hidden[behind], cluster.devices_per_host)


def _interleaved(
    found: SearchResult, point: SearchPoint, device_seconds: float
) -> Iterator[Bounded]:
    yield from interleaved_plans(found.problem, found.wanted, point, found.limit, device_seconds)
    yield math.inf, None
