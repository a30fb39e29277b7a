"""Local moves from the plans that the stage search has found.

The search prices stages one by one and joins neighbouring layers where there are many. The moves
here are judged by the simulated timeline of the whole plan: another schedule, number of
microbatches, end of a stage, or fewer recomputed layers. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from launcher.partition import Assignment
from launcher.plan.inter_op.estimate import grouped_layers, make_estimate, make_pipeline
from launcher.plan.inter_op.interleaved import interleaved_like
from launcher.plan.inter_op.layer_table import FEWEST, NOTHING, Recompute
from launcher.plan.inter_op.problem import Constraints, Outline, Problem, StageChoice, assignment_of
from launcher.plan.inter_op.submeshes import SearchPoint, spread_divisors
from launcher.plan.pipeline import Estimate, estimated
from launcher.plan.profile.measure_layers import UnmeasuredError
from launcher.plan.stage_plan import StagePlan
from launcher.schedule import DEFAULT_SCHEDULE, SCHEDULES, training_schedules

Estimated = tuple[Assignment, Estimate]
Moves = Callable[[Assignment], Iterator[Assignment]]
EqualStages = tuple[float, int, Callable[[], Assignment]]

_FEWEST = 4  # plans to estimate, if there are so many: the best, and what it is better than
_MOST_EQUAL = 24  # plans of equal stages that are estimated first
_MOST_EXTRA_TASKS = 20_000  # of their timelines; and of other numbers of microbatches
_MOST_WORSE = 2  # numbers of microbatches in a row that are no better, and no further one is tried
_MOST_TASKS = 60_000  # of all timelines simulated in one climb
_LEAST_GAIN = 1e-4  # of the step, for a move to be made
_ROUNDING = 1e-9  # relative, of sums in another order


@dataclass
class SearchResult:
    """The plans found so far.

    Attributes:
        problem: the problem.
        wanted: the user's constraints.
        estimates: the plans and their estimates.
        large: those that were taken to fit and do not.
        least_seconds: a lower bound on the step of every plan; None: not known.
        unmeasured: why plans have no estimate.
        tasks: how many tasks were simulated.
        equal: pipelines of equal stages on whole hosts, with the least seconds of a step and the
            number of stages.
    """

    problem: Problem
    wanted: Constraints
    estimates: dict[Assignment, Estimate] = field(default_factory=dict)
    large: dict[Assignment, Estimate] = field(default_factory=dict)
    least_seconds: float | None = None
    unmeasured: list[UnmeasuredError] = field(default_factory=list)
    tasks: int = 0
    equal: list[EqualStages] = field(default_factory=list)

    @property
    def ranked(self) -> list[Estimated]:
        """The plans, best first; if none fits, those that were taken to."""
        every = (self.estimates or self.large).items()
        return sorted(every, key=lambda one: one[1].predicted_step_seconds)

    @property
    def best(self) -> float:
        """The seconds of the best plan."""
        every = (estimate.predicted_step_seconds for estimate in self.estimates.values())
        return min(every, default=math.inf)

    @property
    def limit(self) -> float:
        """The seconds from which on plans are of no interest."""
        return self.best if len(self.estimates) >= _FEWEST else math.inf

    def seconds_of(self, assignment: Assignment) -> float:
        """Return the seconds of a plan; infinite if it does not fit or was not estimated."""
        known = self.estimates.get(assignment)
        return known.predicted_step_seconds if known else math.inf

    def add(self, assignment: Assignment) -> None:
        """Estimate a plan, and keep it if it fits."""
        if assignment in self.estimates or assignment in self.large:
            return
        if assignment.slicing.num_slices in self.problem.refused:  # more replicas than were asked
            return
        self.tasks += 2 * len(assignment.layers) * assignment.num_micro_batches
        try:
            estimate = make_estimate(assignment, self.problem)
        except UnmeasuredError as error:
            self.unmeasured.append(error)
            return
        if self.problem.fits(estimate):
            self.estimates[assignment] = estimate
        elif not SCHEDULES[assignment.schedule].interleaves:  # whose memory is not searched by
            self.large[assignment] = estimate

    def add_equal_stages(self) -> None:
        """Add the best pipelines of equal stages on whole hosts, under every schedule."""
        before, enough = self.tasks, len(self.estimates) + _MOST_EQUAL
        for _, count, made in sorted(self.equal, key=lambda one: one[0]):
            if self.tasks >= before + _MOST_EXTRA_TASKS or len(self.estimates) >= enough:
                break
            if self.wanted.num_stages in (None, count):
                for plan in under_every_schedule(made(), self.problem, self.wanted):
                    self.add(plan)
        self.tasks = before  # they take nothing from what proves the bound

    def refine(self) -> None:
        """Add plans near the best: other microbatches, then schedules, then single layers."""
        self.recount()
        self.reschedule()
        self.climb()

    def recount(self) -> None:
        """Add the best plan with more and with fewer microbatches, as long as it gets faster."""
        before = self.tasks
        for given, estimate in self.ranked[:1] if self.estimates else ():
            count = given.num_micro_batches
            others = list(recounted(given, self.problem, self.wanted))
            for side in (
                [one for one in others if one.num_micro_batches > count],
                [one for one in reversed(others) if one.num_micro_batches < count],
            ):
                least, worse = estimate.predicted_step_seconds, 0
                for one in side:
                    if worse == _MOST_WORSE or self.tasks >= before + _MOST_EXTRA_TASKS:
                        break
                    self.add(one)
                    seconds = self.seconds_of(one)
                    least, worse = min(least, seconds), worse + 1 if seconds >= least else 0
        self.tasks = before

    def reschedule(self) -> None:
        """Add the best plan under every other schedule, also those that have no bound."""
        for given, _ in self.ranked[:1] if self.estimates else ():
            if len(given.layers) == len(given.submeshes):  # else only one schedule runs them
                for plan in under_every_schedule(given, self.problem, self.wanted, every=True):
                    self.add(plan)

    def climb(self) -> None:
        """Add the best plan with fewer recomputed layers and other ends of stages.

        Either may end between joined layers.
        """
        if not self.estimates:
            return
        (best, estimate), whole = self.ranked[0], ungrouped(self.problem)
        refit = self.wanted.remat is None
        moves: Moves = no_moves
        first = [best] if refit else []
        if self.problem.unjoined is not None and len(best.layers) > 1:
            first, moves = [*first, _evened(best)], _moved_ends
        better, faster = climbed(best, estimate, whole, moves, first, refit)
        self.estimates[better] = faster


def equal_stages(problem: Problem, point: SearchPoint, known: Outline) -> Iterator[EqualStages]:
    """Yield pipelines of equal stages on equal submeshes of whole hosts.

    Stages of less than a host are priced as if the next one were on the same host, so that behind
    slow links the search comes late to these. They are the best one for each number of stages and
    remat string; where the recomputation is open, with all layers, selectively and with none. Only
    an estimate tells which of them fits the memory.
    """
    cluster, of, layers = problem.cluster, known.tables, len(problem.groups)
    sizes, remats = np.array(of.sizes), np.array([one.remat for one in known.choices])
    for count, remat in itertools.product(range(1, min(layers, cluster.hosts) + 1), point.remats):
        ways = np.flatnonzero((sizes == cluster.num_devices // count) & (remats == remat))
        if cluster.hosts % count or not len(ways):
            continue
        cuts = np.linspace(0, layers, count + 1).round().astype(int)
        at = cuts[:-1], cuts[1:]
        every = of.seconds[0][at][:, ways].sum(0) + of.rest[0][at][:, ways].max(0)
        best = int(every.argmin())
        if np.isfinite(every[best]):
            one = known.choices[int(ways[best])]
            runs = list(itertools.pairwise(cuts.tolist()))
            for choice in _with_remats(one, problem.table.selective):
                made = functools.partial(assignment_of, problem, point, runs, [choice] * count)
                yield float(every[best]), count, made


def _with_remats(choice: StageChoice, selective: bool) -> list[StageChoice]:
    if choice.remat != FEWEST:
        return [choice]
    words = ("none", "selective", "full") if selective else ("none", "full")
    return [dataclasses.replace(choice, remat=word) for word in words]


def under_every_schedule(
    assignment: Assignment, problem: Problem, wanted: Constraints, every: bool = False
) -> Iterator[Assignment]:
    """Yield an assignment, and the same under every other open schedule that can run it.

    Args:
        assignment: the assignment.
        problem: the problem.
        wanted: the user's constraints.
        every: whether to try those schedules, too, that are rarely better (`improves_1f1b`).
    """
    yield assignment
    if wanted.schedule is not None or len(assignment.layers) == 1:
        return
    trained = (SCHEDULES[name] for name in training_schedules())
    others = [schedule for schedule in trained if every or schedule.improves_1f1b]
    for schedule in others:
        may_split = not schedule.splits_backward or set(assignment.remat) == {"none"}
        if may_split and not schedule.interleaves:
            yield dataclasses.replace(assignment, schedule=schedule.name)
    for schedule in others:
        if schedule.interleaves:
            yield from interleaved_like(assignment, problem, wanted, schedule.name)


def on_few_devices(problem: Problem, wanted: Constraints) -> Iterator[Assignment]:
    """Yield the whole step on some of the devices, as replicas; the others idle.

    Where devices share a machine, each is the faster for it.
    """
    count, remat = wanted.num_micro_batches or 1, wanted.remat or "none"
    if wanted.num_stages not in (None, 1):
        return
    schedule = wanted.schedule or DEFAULT_SCHEDULE
    for size in problem.sizes:
        slices = count * size
        cuts = problem.batch_size % slices == 0 and (problem.sliced or slices == 1)
        if size == problem.cluster.num_devices or not cuts or slices in problem.refused:
            continue
        point = SearchPoint(
            count, problem.batch_size, size, schedule, (remat,), None, wanted.reduction
        )
        choice = StageChoice((size, 1), 0, remat)
        yield assignment_of(problem, point, [(0, len(problem.groups))], [choice])


def recounted(
    assignment: Assignment, problem: Problem, wanted: Constraints
) -> Iterator[Assignment]:
    """Yield an assignment with other numbers of microbatches, by growing number."""
    if wanted.num_micro_batches is not None or not problem.sliced:
        return
    data = math.lcm(*(submesh.logical_mesh[0] for submesh in assignment.submeshes))
    for count in spread_divisors(problem.batch_size, problem.batch_size):
        if problem.batch_size % (count * data) == 0 and count != assignment.num_micro_batches:
            yield dataclasses.replace(assignment, num_micro_batches=count)


def no_moves(assignment: Assignment) -> Iterator[Assignment]:
    """Yield nothing."""
    return iter(())


def _moved_ends(assignment: Assignment) -> Iterator[Assignment]:
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


def _evened(assignment: Assignment) -> Assignment:
    """Return the assignment with stages of as equal numbers of layers as can be."""
    stages = len(assignment.layers)
    every = [layer for layers in assignment.layers for layer in layers]
    ends = [round(len(every) * s / stages) for s in range(stages + 1)]
    layers = tuple(tuple(every[first:end]) for first, end in itertools.pairwise(ends))
    return dataclasses.replace(assignment, layers=layers)


def climbed(
    assignment: Assignment,
    estimate: Estimate,
    problem: Problem,
    moves: Moves,
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
        refit: whether each plan is tried with as few recomputed layers as fit (`fewest_again`).
    """
    left = _MOST_TASKS
    upcoming: Iterator[Assignment] = itertools.chain(first, moves(assignment))
    while (moved := next(upcoming, None)) is not None and left > 0:
        try:
            fitted = fewest_again(moved, problem) if refit else moved
            if fitted is None or fitted == assignment:
                continue
            pipeline = make_pipeline(fitted, problem)
        except UnmeasuredError:
            continue
        if not problem.fits(pipeline):
            continue
        left -= 2 * len(fitted.layers) * fitted.num_micro_batches
        most = (1 - _LEAST_GAIN) * estimate.predicted_step_seconds
        if not problem.cluster.shares_machine and pipeline.busy_seconds > most * (1 + _ROUNDING):
            continue  # whatever its timeline is: one device works longer
        other = estimated(pipeline)
        if other.predicted_step_seconds <= most:
            assignment, estimate, upcoming = fitted, other, moves(fitted)
    return assignment, estimate


def fewest_again(
    assignment: Assignment, problem: Problem, memory: Sequence[float] | None = None
) -> Assignment | None:
    """Return the assignment with the least recomputation that fits the memory; None: nothing fits.

    A stage recomputes its first layers in full, and the others selectively if that is faster.
    Stages on one submesh are decided one after another, those on others at once, each by bisection.

    Args:
        assignment: the assignment, whose own recomputation does not matter.
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
