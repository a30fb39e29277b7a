"""The search problem, and the search over all that a plan may set.

That is the numbers of microbatches and of common replicas, and for each the stages with their
submeshes, logical meshes, ZeRO levels and rematerialisation. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from launcher.hardware import ClusterShape
from launcher.partition import DEFAULT_REDUCTION, Assignment, Reduction, Submesh
from launcher.plan.cost.formulas import Links
from launcher.plan.inter_op.layer_table import FEWEST, LayerTable
from launcher.plan.inter_op.stage_construction import BestStages, best_stages, lower_bound
from launcher.plan.inter_op.stage_cost import StageCosts
from launcher.plan.inter_op.stage_profiling import Outline, Outlines, Priced, StageChoice, price
from launcher.plan.inter_op.submeshes import (
    Mesh,
    SearchPoint,
    place_submeshes,
    spread_divisors,
    submesh_sizes,
)
from launcher.schedule import DEFAULT_SCHEDULE, SCHEDULES

_MOST_SLICES_TRIED = 1024
_MOST_FOUND = 4

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Constraints:
    """What the user fixed, and what is left open (None)."""

    num_micro_batches: int | None = None
    schedule: str | None = None
    remat: str | None = None
    num_stages: int | None = None
    reduction: Reduction = DEFAULT_REDUCTION


@dataclass(frozen=True)
class Candidate:
    """An assignment that the search found.

    Attributes:
        assignment: the assignment.
        seconds: the objective that the search gave it.
        choices: how each stage uses its devices.
        memory: peak bytes on one device of each stage.
    """

    assignment: Assignment
    seconds: float
    choices: tuple[StageChoice, ...]
    memory: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Problem:
    """What is searched: layers by their costs, a batch and a cluster.

    Attributes:
        table: the costs of the layers, each of which is a group of the step's.
        groups: the step's layers in each group.
        batch_size: rows of the whole batch.
        cluster: the devices to plan for.
        sizes: the numbers of devices that a stage may have.
        memory_bytes: what a plan may use of a device's memory; None: no limit.
        sliced: whether the batch may be cut into microbatches and replicas at all.
        refused: the numbers of slices into which it may not.
        unjoined: the costs of the step's own layers, where `table` is of groups of several.
    """

    table: LayerTable
    groups: tuple[tuple[int, ...], ...]
    batch_size: int
    cluster: ClusterShape
    sizes: tuple[int, ...]
    memory_bytes: float | None
    sliced: bool = True
    refused: frozenset[int] = frozenset()
    unjoined: LayerTable | None = None

    @functools.cached_property
    def costs(self) -> Callable[[Mesh, SearchPoint, bool, Links], StageCosts]:
        """The costs of the stages on one logical mesh, as `StageCosts` takes it, kept."""
        return functools.cache(lambda mesh, *of: StageCosts(self.table, [mesh], self.cluster, *of))


def of_batch(problem: Problem, size: int) -> Problem:
    """Return the problem of a batch of another size: samples cost their share."""
    table = problem.table.of_batch(size / problem.batch_size)
    sizes = submesh_sizes(problem.cluster, size)
    return dataclasses.replace(problem, table=table, batch_size=size, sizes=sizes, unjoined=None)


def best_of(
    problem: Problem, wanted: Constraints, progress: Progress = lambda share: None
) -> list[Candidate]:
    """Return the best candidates, best first; empty where nothing fits.

    For the most promising numbers of microbatches and of common replicas they have the best stages;
    of the same stages only the best number of microbatches is kept.

    What cannot be among the best few, by its lower bound, is not solved: the best few are the same
    as if everything were.
    """
    devices = problem.cluster.num_devices
    promising: list[tuple[float, int, SearchPoint, Outline]] = []
    schedule = wanted.schedule or DEFAULT_SCHEDULE
    for alike in alike_but_replicas(settings(problem, wanted, schedule)):
        outlines = Outlines(problem.table, problem.cluster, problem.sizes, alike[0])
        for point in alike:
            known = outlines.of(point)
            least = sum(lower_bound(known.candidates, devices))
            if np.isfinite(least):
                promising.append((least, len(promising), point, known))
    promising.sort(key=lambda one: one[:2])
    distinct: dict[object, Candidate] = {}
    for k, (least, _, point, known) in enumerate(promising):
        ranked = sorted(candidate.seconds for candidate in distinct.values())
        most = ranked[_MOST_FOUND - 1] if len(ranked) >= _MOST_FOUND else np.inf
        if least >= most:
            break

        def inner(share: float, k: int = k) -> None:
            progress((k + share) / len(promising))

        useful = known.useful(devices, most)
        priced = price(problem.table, problem.cluster, point, problem.sizes, useful=useful)
        best = best_stages(
            priced.candidates, devices, best=most, progress=inner, num_stages=wanted.num_stages
        )
        if best is not None:
            candidate = candidate_of(best, priced, point, problem)
            same = candidate.assignment.layers, candidate.choices
            if same not in distinct or candidate.seconds < distinct[same].seconds:
                distinct[same] = candidate
    return sorted(distinct.values(), key=lambda c: c.seconds)[:_MOST_FOUND]


def settings(problem: Problem, wanted: Constraints, schedule: str) -> Iterator[SearchPoint]:
    """Yield what may be fixed for one run of the stage search, under a schedule."""
    batch_size, devices = problem.batch_size, problem.cluster.num_devices
    asked, most = wanted.num_micro_batches, min(batch_size, _MOST_SLICES_TRIED)
    counts = [asked] if asked else spread_divisors(batch_size, most)
    for count, replicas in itertools.product(counts, range(1, devices + 1)):
        if batch_size % (count * replicas) or count * replicas in problem.refused:
            continue
        if count * replicas > 1 and not problem.sliced:
            continue
        yield SearchPoint(
            num_micro_batches=count,
            batch_size=batch_size,
            replicas=replicas,
            schedule=schedule,
            remats=remat_choices(wanted, schedule),
            memory_bytes=problem.memory_bytes,
            reduction=wanted.reduction,
        )


def alike_but_replicas(every: Iterable[SearchPoint]) -> Iterator[list[SearchPoint]]:
    """Yield the settings in a row that differ in their replicas alone."""
    for _, alike in itertools.groupby(every, lambda one: dataclasses.replace(one, replicas=1)):
        yield list(alike)


def remat_choices(wanted: Constraints, schedule: str) -> tuple[str, ...]:
    """Return the words for rematerialisation that a stage may have under a schedule.

    A schedule that splits backward passes is searched for what is not recomputed, unless it is
    asked for: there may be none.
    """
    if SCHEDULES[schedule].splits_backward and wanted.schedule is None:
        return ("none",) if wanted.remat in (None, "none") else ()
    if wanted.remat:
        return (wanted.remat,)
    return ("none", "full") if SCHEDULES[schedule].interleaves else (FEWEST,)


def candidate_of(
    found: BestStages, priced: Priced, point: SearchPoint, problem: Problem
) -> Candidate:
    """Return stages that were found as an assignment."""
    count = len(found.stages)
    at = [(count - 1 - s, *stage) for s, stage in enumerate(found.stages)]
    chosen = [priced.choices[int(priced.chosen[i])] for i in at]
    recomputes = [problem.table.recomputes[int(priced.recomputed[i])] for i in at]
    runs = [(first, end) for first, end, _ in found.stages]
    choices = tuple(
        dataclasses.replace(one, remat=recompute.remat(problem.groups[first:end]))
        if one.remat == FEWEST
        else one
        for one, recompute, (first, end) in zip(chosen, recomputes, runs, strict=True)
    )
    assignment = assignment_of(problem, point, runs, choices)
    memory = tuple(float(priced.memory[i]) for i in at)
    return Candidate(assignment, found.objective, choices, memory)


def assignment_of(
    problem: Problem,
    point: SearchPoint,
    runs: Sequence[tuple[int, int]],
    choices: Sequence[StageChoice],
    num_meshes: int | None = None,
) -> Assignment:
    """Return stages of runs of layer groups as an assignment.

    Args:
        problem: the problem.
        point: the values held fixed.
        runs: the groups of each stage, `(first, end)`.
        choices: how each stage uses its devices.
        num_meshes: the submeshes, on which the stages take turns; None: each has its own.
    """
    count = num_meshes or len(runs)
    shapes = [choice.logical_mesh for choice in choices[:count]]
    devices = place_submeshes([math.prod(shape) for shape in shapes], problem.cluster)
    return Assignment(
        method="auto",
        layers=tuple(
            tuple(itertools.chain.from_iterable(problem.groups[first:end])) for first, end in runs
        ),
        submeshes=tuple(map(Submesh, devices, shapes)),
        mesh_of=tuple(s % count for s in range(len(runs))),
        num_micro_batches=point.num_micro_batches,
        schedule=point.schedule,
        remat=tuple(choice.remat for choice in choices),
        zero=tuple(choice.zero for choice in choices),
        sequence=tuple(choice.sequence for choice in choices),
        reduction=point.reduction,
    )
