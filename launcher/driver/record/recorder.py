"""Turns the workers' measurements of a step into what is logged, and detects divergence."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.base.spans import SpanRecorder
from launcher.driver.record.wall_clock import WallClock
from launcher.report.breakdown.goodput import Goodput
from launcher.report.trackers.tracker import Metrics
from launcher.runtime import ReplicaError, check_equal

if TYPE_CHECKING:
    from launcher.driver.folder.status import Status
    from launcher.driver.record.best import Best
    from launcher.driver.record.hooks import Hooks
    from launcher.driver.record.samples import Samples
    from launcher.driver.record.timelines import Timelines
    from launcher.train.sampling import Sample
    from launcher.train.step_result import StepResult


FINITE = ("train/loss", "train/grad_norm")
MOST_SKIPPED = 10  # consecutive steps; a run that skips more no longer learns

_log = logging.getLogger(__name__)


class DivergedError(Exception):
    """The loss or the gradient norm is not finite; earlier checkpoints remain.

    Attributes:
        key: the metric that is not finite.
        step: the step at which it was.
    """

    def __init__(self, key: str, value: float, step: int) -> None:
        super().__init__(
            f"{key} is {value} at step {step}; lower optimizer.learning_rate, or set "
            "optimizer.clip_norm or optimizer.warmup_steps"
        )
        self.key = key
        self.step = step


@dataclass(frozen=True)
class Followers:
    """What is told of every step that goes on the record.

    Attributes:
        best: follows the evaluations.
        hooks: the user's.
        status: tells others what the run is doing.
    """

    best: Best | None = None
    hooks: Hooks | None = None
    status: Status | None = None
    samples: Samples | None = None

    def tell(self, result: StepResult, metrics: Metrics) -> None:
        """Tell of a step and its metrics."""
        if self.status:
            self.status.made(result.step, metrics)
        if self.best:
            self.best.add(result.step, metrics)
        if self.hooks:
            self.hooks.stepped(result, metrics)


class Recorder:
    """Logs every `log_every`-th step, the last one, and those that are out of the ordinary.

    Args:
        log: takes a step's number and its metrics.
        log_every: the number of steps from one logged step to the next.
        performance: returns the `perf/...` metrics of a step that took so many seconds.
        skips: whether a step whose loss or gradient is not finite leaves the state unchanged.
        timelines: takes what workers record of steps; None: nothing is recorded.
        wall: counts the run's wall time.
        followers: are told of every step, logged or not.

    Attributes:
        timelines: as given.
        wall: counts the run's wall time.
        spans: takes what the driver does while a step is recorded.
        finished_steps: the newest finished step, 0 before the first.
        first_step_at: when the first step of this process completed, in seconds since the epoch.
    """

    def __init__(
        self,
        log: Callable[[int, Metrics], None],
        log_every: int,
        performance: Callable[[float], Metrics],
        skips: bool = False,
        timelines: Timelines | None = None,
        wall: WallClock | None = None,
        followers: Followers | None = None,
    ) -> None:
        self._followers = followers or Followers()
        self.timelines = timelines
        self.spans = timelines.spans if timelines else SpanRecorder()
        self._log = log
        self.wall = wall or WallClock(Goodput(), time.time())
        self._skips = skips
        self._skipped_in_a_row = 0
        self._log_every = log_every
        self._performance = performance
        self._unlogged: tuple[int, Metrics] | None = None
        self.finished_steps = 0
        self.first_step_at: float | None = None

    def begin(self, finished_steps: int) -> None:
        """Forget the steps after `finished_steps`, from which the run goes on."""
        self._unlogged, self._skipped_in_a_row = None, 0
        self.finished_steps = finished_steps

    def record(self, result: StepResult | None) -> None:
        """Take one step's result; None is ignored.

        Raises:
            DivergedError: a value is not finite, and training cannot go on from it.
            ReplicaError: replicas of the state differ after the step.
        """
        if result is None:
            return
        self.finished_steps = result.step
        self.first_step_at = self.first_step_at or result.completed_at
        if self.timelines:
            self.timelines.add(result.recordings)
        rates = self._performance(result.metrics["perf/step_seconds"])
        self._unlogged = result.step, {**result.metrics, **rates}
        try:
            check_equal(result.copies, f"step {result.step}: ")
        except ReplicaError:
            self.log_newest()
            raise
        bad = [key for key in FINITE if not math.isfinite(result.metrics[key])]
        if bad or result.step % self._log_every == 0 or "eval/loss" in result.metrics:
            self.log_newest()
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if bad else 0
        if not bad:
            self._followers.tell(result, {**result.metrics, **rates})
            return
        key, value = bad[0], result.metrics[bad[0]]
        if not self._skips or self._skipped_in_a_row > MOST_SKIPPED:
            raise DivergedError(key, value, result.step)
        _log.warning(f"step {result.step}: {key} is {value}, the update is skipped")
        self._followers.tell(result, {**result.metrics, **rates})

    @property
    def best(self) -> Best | None:
        """What follows the evaluations; None: nothing depends on them."""
        return self._followers.best

    @property
    def samples(self) -> Samples | None:
        """What the model writes; None: nothing."""
        return self._followers.samples

    def take_sample(self, sample: Sample) -> None:
        """Take what the model has written after a step."""
        if self._followers.samples:
            self._followers.samples.take(sample)

    def lap(self, phase: str, result: StepResult | None = None) -> None:
        """Count the wall time since the last lap.

        Args:
            phase: "training", "evaluating" or, for a save beside training, "saving".
            result: that of the step that ended in it, if one did.
        """
        if phase == "saving":
            self.wall.save()
        elif result is None:
            self.wall.lap(phase)
        else:
            if phase == "evaluating":
                self.wall.lap(phase)
            self.wall.step(result.step, result.metrics, evaluated=phase == "evaluating")

    def log_newest(self) -> None:
        """Log the newest step, unless it is logged already."""
        if self._unlogged:
            self._log(*self._unlogged)
        self._unlogged = None
