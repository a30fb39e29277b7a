"""What a search has found: plans with their estimates, and what is tried beside the best. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from launcher.partition.assignment import Assignment
from launcher.plan.errors import UnmeasuredError
from launcher.plan.inter_op.boundaries import by_single_layers
from launcher.plan.inter_op.equal_stages import EqualStages, assignment_of
from launcher.plan.inter_op.estimate import make_estimate
from launcher.plan.inter_op.problem import Constraints, Problem
from launcher.plan.inter_op.variants import recounted, schedule_variants
from launcher.plan.pipeline import Estimate
from launcher.schedule import SCHEDULES

Estimated = tuple[Assignment, Estimate]

_FEWEST = 4  # plans to estimate, if there are so many: the best, and what it is better than
_MOST_EQUAL = 24  # plans of equal stages that are estimated first
_MOST_EXTRA_TASKS = 20_000  # of their timelines; and of other numbers of microbatches
_MOST_WORSE = 2  # numbers of microbatches in a row that are no better, and no further one is tried


@dataclass
class Found:
    """What a search has found so far.

    Attributes:
        problem: the problem.
        estimates: the plans and their estimates.
        large: those that were taken to fit and do not.
        least_seconds: a lower bound on the step of every plan; None: not known.
        unmeasured: why plans have no estimate.
        tasks: how many tasks were simulated.
        equal: pipelines of equal stages on whole hosts.
    """

    problem: Problem
    estimates: dict[Assignment, Estimate] = field(default_factory=dict)
    large: dict[Assignment, Estimate] = field(default_factory=dict)
    least_seconds: float | None = None
    unmeasured: list[UnmeasuredError] = field(default_factory=list)
    tasks: int = 0
    equal: list[EqualStages] = field(default_factory=list)

    @property
    def ranked(self) -> list[Estimated]:
        """The plans, best first; if none fits, what was taken to."""
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
        needed = max(stage.memory_bytes for stage in estimate.stages)
        if needed <= (self.problem.memory_bytes or math.inf):
            self.estimates[assignment] = estimate
        elif not SCHEDULES[assignment.schedule].interleaves:  # whose memory is not searched by
            self.large[assignment] = estimate

    def add_equal_stages(self, wanted: Constraints) -> None:
        """Add the best pipelines of equal stages on whole hosts, under every schedule."""
        most, enough = self.tasks + _MOST_EXTRA_TASKS, len(self.estimates) + _MOST_EQUAL
        for one in sorted(self.equal, key=lambda one: one.seconds):
            if self.tasks >= most or len(self.estimates) >= enough:
                break
            if wanted.num_stages in (None, one.num_stages):
                given = assignment_of(one, self.problem)
                for plan in schedule_variants(given, self.problem, wanted):
                    self.add(plan)
        self.tasks = most - _MOST_EXTRA_TASKS  # they take nothing from what proves the bound

    def recount(self, wanted: Constraints) -> None:
        """Add the best plan with more and with fewer microbatches, as long as it gets faster."""
        before, most = self.tasks, self.tasks + _MOST_EXTRA_TASKS
        for given, estimate in self.ranked[:1] if self.estimates else ():
            count = given.num_micro_batches
            others = sorted(
                recounted(given, self.problem, wanted), key=lambda one: one.num_micro_batches
            )
            for side in (
                [one for one in others if one.num_micro_batches > count],
                [one for one in reversed(others) if one.num_micro_batches < count],
            ):
                least, worse = estimate.predicted_step_seconds, 0
                for one in side:
                    if worse == _MOST_WORSE or self.tasks >= most:
                        break
                    self.add(one)
                    seconds = self.seconds_of(one)
                    least, worse = min(least, seconds), worse + 1 if seconds >= least else 0
        self.tasks = before

    def reschedule(self, wanted: Constraints) -> None:
        """Add the best plan under every other schedule, also those that have no bound."""
        before = self.tasks
        for given, _ in self.ranked[:1] if self.estimates else ():
            if len(given.layers) == len(given.submeshes):  # else only one schedule runs them
                for plan in schedule_variants(given, self.problem, wanted, every=True):
                    self.add(plan)
        self.tasks = before

    def climb(self, wanted: Constraints) -> None:
        """Add the best plan with fewer layers that are computed again, and other ends of stages.

        Either may end between joined layers.
        """
        if self.estimates:
            is_open = wanted.remat is None
            better, estimate = by_single_layers(*self.ranked[0], self.problem, is_open)
            self.estimates[better] = estimate
