"""The search problem, prices of stages at one point of the search, and the best stages by them.

For each number of devices the logical mesh, ZeRO level and rematerialisation that fit the memory
are chosen here, so that the stage search sees few prices. It is run for the numbers of microbatches
and of common replicas. Pure.
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
from launcher.partition import DEFAULT_REDUCTION, MODEL, Assignment, Reduction, Submesh
from launcher.plan.cost.formulas import Links
from launcher.plan.inter_op.layer_table import FEWEST, LayerTable, Recompute, recompute_of
from launcher.plan.inter_op.stage_construction import (
    BestStages,
    StageTables,
    best_stages,
    lower_bound,
    rests,
    with_others,
)
from launcher.plan.inter_op.stage_cost import StageCosts
from launcher.plan.inter_op.submeshes import (
    Mesh,
    SearchPoint,
    place_submeshes,
    spread_divisors,
    submesh_sizes,
)
from launcher.plan.stage_plan import Staged
from launcher.schedule import DEFAULT_SCHEDULE, SCHEDULES

# seconds, rest, once, memory, chosen, recomputed, each `[stages behind, first, end]`
Way = dict[str, np.ndarray]
_MOST_SLICES_TRIED = 1024
_MOST_FOUND = 4
Progress = Callable[[float], None]

ZERO_LEVELS = (0, 2, 3)
_ROUNDING = 1e-9  # relative, of sums in another order


@dataclass(frozen=True)
class StageChoice:
    """How a stage uses its devices."""

    logical_mesh: tuple[int, int]
    zero: int
    remat: str
    sequence: bool = False


@dataclass(frozen=True, eq=False)
class Priced:
    """The costs of possible stages, and the choice behind each.

    Attributes:
        tables: the costs.
        choices: the choices.
        chosen: the choice of each candidate, as a position in `choices`.
        memory: the memory of each candidate.
        recomputed: what each recomputes where its choice is `FEWEST`, as a position in the table's
            `recomputes`.
    """

    tables: StageTables
    choices: tuple[StageChoice, ...]
    chosen: np.ndarray
    memory: np.ndarray
    recomputed: np.ndarray


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

    @property
    def depth(self) -> int:
        """The most stages that there may be with a submesh each."""
        return min(self.table.num_layers, self.cluster.num_devices)

    def fits(self, plan: Staged) -> bool:
        """Return whether a plan fits the memory, by its prediction."""
        return plan.most_bytes <= (self.memory_bytes or np.inf)

    @functools.cached_property
    def costs(self) -> Callable[[Mesh, SearchPoint, bool, Links], StageCosts]:
        """The costs of the stages on one logical mesh, as `StageCosts` takes it, kept."""
        return functools.cache(lambda mesh, *of: StageCosts(self.table, [mesh], self.cluster, *of))


def in_flight(problem: Problem, point: SearchPoint) -> list[int]:
    """Return the microbatches whose activations a stage holds, by the number of stages behind it.

    The stage is taken to be the first, which gives a lower bound, since the number of all stages is
    not known here.
    """
    schedule, most = SCHEDULES[point.schedule], point.num_micro_batches
    return [schedule.in_flight_bound(0, behind + 1, most) for behind in range(problem.depth)]


def hidden_forwards(problem: Problem, point: SearchPoint) -> list[int]:
    """Return the forward passes that the first round trip hides, by the number of stages behind.

    Devices that share a machine are faster while others wait: there nothing is a bound.
    """
    if problem.cluster.shares_machine:
        return [0] * problem.depth
    schedule, most = SCHEDULES[point.schedule], point.num_micro_batches
    return [schedule.hidden_forwards(behind, most) for behind in range(problem.depth)]


@dataclass(frozen=True, eq=False)
class Outline:
    """What each stage costs at least, wherever in a pipeline it is.

    Attributes:
        tables: the costs as if one number of stages were behind it, of every way to use devices
            in the order of `ways`.
        choices: the choice behind each.
        device_seconds: `[first, end]`: the least time that a stage takes of its devices together in
            a step, under any schedule that holds no fewer microbatches.
    """

    tables: StageTables
    choices: tuple[StageChoice, ...]
    device_seconds: np.ndarray

    def useful(self, num_devices: int, limit: float) -> np.ndarray:
        """Return which stages may be part of a plan below `limit` seconds, `[first, end, way]`."""
        of = self.tables
        if not of.seconds.size:
            return np.zeros((0, 0, 0), bool)
        seconds, rest = of.seconds[0], rests(of)[0]
        taken = rest * np.array(of.sizes)
        least = with_others(seconds) + np.maximum(rest, with_others(taken) / num_devices)
        return np.asarray(least < limit * (1 + _ROUNDING))


class Outlines:
    """Outlines of every stage of the table's layers, in a fraction of the time of their prices.

    They are of settings that differ in their replicas alone: what these do not change is computed
    once, when the first is asked for.
    """

    def __init__(self, problem: Problem, point: SearchPoint) -> None:
        """Keep the problem, and what the settings, of which `point` is one, have in common."""
        self._problem = problem
        self._point = dataclasses.replace(point, replicas=None)
        self._meshes = [m for size in problem.sizes for m in meshes_of(problem, self._point, size)]
        self._uses = list(itertools.product(ZERO_LEVELS, point.remats))

    @functools.cached_property
    def _stages(self) -> StageCosts:
        problem, point = self._problem, self._point
        goes_back = SCHEDULES[point.schedule].last_stage_alternates(point.num_micro_batches)
        return StageCosts(problem.table, self._meshes, problem.cluster, point, goes_back)

    @functools.cached_property
    def _lost(self) -> list[np.ndarray]:
        """For each use 0 where it may fit the memory, else infinite, `[mesh, first, end]`."""
        held = min(in_flight(self._problem, self._point))
        most = self._point.memory_bytes or np.inf
        needs = (
            self._stages.memory(zero, recompute_in(remat, self._problem.table), [held])[0]
            for zero, remat in self._uses
        )
        return [np.where(needed <= most, 0.0, np.inf) for needed in needs]

    def of(self, point: SearchPoint) -> Outline:
        """Return the outline in one of the settings."""
        table, count = self._problem.table, self._problem.table.num_layers
        at = [k for k, mesh in enumerate(self._meshes) if splits(point, mesh.data)]
        meshes = [self._meshes[k] for k in at]
        if not meshes:
            none = np.zeros((0, 0, 0, 0))
            return Outline(StageTables((), none, none), (), np.full((count, count + 1), np.inf))
        stages = self._stages.among(at, point)
        hidden = max(hidden_forwards(self._problem, point))
        found: list[tuple[np.ndarray, ...]] = []
        for (zero, remat), every in zip(self._uses, self._lost, strict=True):
            lost = every[at]
            first, rest, work = lost, lost[None], lost
            if np.isfinite(lost).any():
                first, rest, work, _ = stages.seconds(zero, recompute_in(remat, table), [hidden])
            found.append((first + lost, rest[0] + lost, work + lost))
        # By the mesh first, as `ways` has them, and without ZeRO levels of one replica.
        kept = [
            (k, way)
            for k, mesh in enumerate(meshes)
            for way in range(len(found))
            if mesh.data > 1 or way < len(point.remats)
        ]
        by_way = tuple(way for _, way in kept), tuple(k for k, _ in kept)
        first, rest, work = (np.stack(of)[by_way] for of in zip(*found, strict=True))
        counts = tuple(meshes[k].devices for k, _ in kept)
        device_seconds = (work * np.array(counts)[:, None, None]).min(0)
        laid = (np.moveaxis(of, 0, -1)[None] for of in (first, rest))
        choices = [choice_on(meshes[k], *self._uses[way], table) for k, way in kept]
        return Outline(StageTables(counts, *laid), tuple(choices), device_seconds)


def price(
    problem: Problem, point: SearchPoint, useful: np.ndarray | None, beaten: bool = False
) -> Priced:
    """Price every stage of the table's layers.

    Of the ways to use a number of devices those are kept that no other beats both in seconds and in
    rest: which of them is best depends on the other stages. The first is the fastest.

    Args:
        problem: the problem.
        point: what is fixed.
        useful: which stages to price, `[first, end, way]` in the order of `ways`; None: all.
        beaten: whether to keep all ways.
    """
    choices: list[StageChoice] = []
    fronts: list[tuple[int, Way]] = []
    for size in problem.sizes:
        listed = list(ways(problem, point, size, choices, useful))
        fronts.extend((size, way) for way in (listed if beaten else _fronts(listed)))
    if not fronts:
        none = np.zeros((0, 0, 0, 0))
        return Priced(StageTables((), none, none), (), none, none, none)
    stacked = {name: np.stack([front[name] for _, front in fronts], -1) for name in fronts[0][1]}
    of_sizes = tuple(size for size, _ in fronts)
    found = StageTables(of_sizes, stacked["seconds"], stacked["rest"], stacked["once"])
    chosen = stacked["chosen"].astype(np.int32)
    return Priced(found, tuple(choices), chosen, stacked["memory"], stacked["recomputed"])


def ways(
    problem: Problem,
    point: SearchPoint,
    size: int,
    choices: list[StageChoice],
    useful: np.ndarray | None,
) -> Iterator[Way]:
    """Yield every use of `size` devices, infinite where it does not fit; extend `choices`.

    Of what is not `useful` (`[first, end, way]`, by the position in `choices`) all is infinite, and
    a way of which nothing is useful is left out.
    """
    table = problem.table
    goes_back = SCHEDULES[point.schedule].last_stage_alternates(point.num_micro_batches)
    hidden, held = hidden_forwards(problem, point), in_flight(problem, point)
    for mesh in meshes_of(problem, point, size):
        stage = StageCosts(table, [mesh], problem.cluster, point, goes_back)
        for zero, remat in itertools.product(ZERO_LEVELS, point.remats):
            if zero and mesh.data == 1:
                continue
            at = len(choices)
            choices.append(choice_on(mesh, zero, remat, table))
            wanted = None if useful is None else useful[:, :, at]
            if wanted is not None and not wanted.any():
                continue
            asked = recompute_in(remat, table)
            chosen: Recompute | np.ndarray = asked
            if asked.is_open:
                chosen, needs = stage.fewest(zero, held, wanted)
            else:
                needs = stage.memory(zero, asked, held)
            every = needs, *stage.seconds(zero, chosen, hidden)
            needs, one, other, _, once = (of[..., 0, :, :] for of in every)
            positions = chosen[..., 0, :, :] if isinstance(chosen, np.ndarray) else np.array(0)
            fits = needs <= (point.memory_bytes or np.inf)
            lost = np.where(fits if wanted is None else fits & wanted, 0.0, np.inf)
            timed = {"seconds": one + lost, "rest": other + lost, "memory": needs}
            fixed = {"once": once, "chosen": np.array(at), "recomputed": positions}
            yield timed | {name: np.broadcast_to(of, needs.shape) for name, of in fixed.items()}


def recompute_in(remat: str, table: LayerTable) -> Recompute:
    """Return the recomputation that a remat string asks of stages of the table's first layers."""
    groups = table.groups or [(i,) for i in range(table.num_layers)]
    return recompute_of(remat, groups, table.selective)


def choice_on(mesh: Mesh, zero: int, remat: str, table: LayerTable) -> StageChoice:
    """Return a use of the devices of a mesh."""
    return StageChoice((mesh.data, mesh.size(MODEL)), zero, remat, table.is_sequence(mesh.row))


def meshes_of(problem: Problem, point: SearchPoint, size: int) -> Iterator[Mesh]:
    """Yield the logical meshes of `size` devices that a microbatch can be cut along."""
    for row, model in enumerate(problem.table.model_sizes):
        if size % model == 0 and splits(point, size // model):
            yield Mesh.of(size // model, model, row)


def _fronts(listed: Sequence[Way]) -> Iterator[Way]:
    """Yield the Pareto-optimal ways, by growing seconds and falling rest."""
    if not listed:
        return
    all_of = {name: np.stack([way[name] for way in listed]) for name in listed[0]}
    while np.isfinite(all_of["seconds"]).any():
        fastest = all_of["seconds"].min(0)
        tied = np.where(all_of["seconds"] <= fastest, all_of["rest"], np.inf)
        at = tied.argmin(0), *np.ogrid[tuple(map(slice, tied.shape[1:]))]
        front = {name: of[at] for name, of in all_of.items()}
        yield front
        beaten = all_of["rest"] >= front["rest"][None]
        all_of["seconds"] = np.where(beaten, np.inf, all_of["seconds"])


def splits(point: SearchPoint, data: int) -> bool:
    """Return whether a microbatch can be cut along so many devices, and they into the replicas."""
    rows = point.batch_size // point.num_micro_batches
    return data % (point.replicas or 1) == 0 and rows % data == 0


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
        outlines = Outlines(problem, alike[0])
        for point in alike:
            known = outlines.of(point)
            least = sum(lower_bound(known.tables, devices))
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

        priced = price(problem, point, known.useful(devices, most))
        best = best_stages(
            priced.tables, devices, best=most, progress=inner, num_stages=wanted.num_stages
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
    """Return the remat strings that a stage may have under a schedule.

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
