"""Steps as they finish: logged metrics, divergence, callbacks, and timelines of recorded ones."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base import Clock, SpanRecorder
from launcher.config.sections import Train
from launcher.driver.callback import Callback, Callbacks
from launcher.driver.record.accounting import WallClock
from launcher.driver.record.slowness import Slowness
from launcher.report.breakdown import Goodput
from launcher.report.pages.timeline import FILE, ProcessSpans, read_timeline
from launcher.report.trackers.tracker import Metrics
from launcher.runtime import ReplicaError, check_equal
from launcher.train import LIMIT

if TYPE_CHECKING:
    from launcher.train.step_result import Recording, StepResult

FINITE = ("train/loss", "train/grad_norm")
SCORE = "train/spike_score"
MOST_SKIPPED = 10  # consecutive steps; a run that skips more no longer learns
_PATIENCE, _LEAST_SECONDS = 10, 10.0
_PACE_STEPS, _FEWEST = 100, 3  # the newest steps, and the fewest, that make a pace
_UNDER_WAY = 3  # steps of which the driver has no result yet

_log = logging.getLogger(__name__)
TRACES = "profile"


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


class SpikeError(DivergedError):
    """The loss or the gradient norm is far above that of the steps before; see `DivergedError`."""

    def __init__(self, metrics: Mapping[str, float], step: int) -> None:
        Exception.__init__(self, spike_text(metrics, step))
        self.key, self.step = SCORE, step


def spike_text(metrics: Mapping[str, float], step: int) -> str:
    """Return what a step's metrics say of a spike."""
    loss, norm = (f"{key} is {metrics[key]:.6g}" for key in FINITE)
    return (
        f"{loss} and {norm} at step {step}: far above the steps before (score "
        f"{metrics[SCORE]:.3g}, a spike above {LIMIT:g})"
    )


class StepLog:
    """Logs every `log_every`-th step, the last one, and those that are out of the ordinary.

    Args:
        log: takes a step's number and its metrics.
        log_every: the number of steps from one logged step to the next.
        performance: returns the `perf/...` metrics of a step that took so many seconds.
        skips: whether a step whose loss or gradient is not finite leaves the state unchanged.
        spikes: `train.spikes`.
        callbacks: the run's callbacks, called for every step, logged or not.

    Attributes:
        callbacks: as given.
        timelines: collects what workers record of steps.
        wall: counts the run's wall time.
        finished_steps: the newest finished step, 0 before the first.
        first_step_at: when the first step of this process completed, in seconds since the epoch.
    """

    def __init__(
        self,
        log: Callable[[int, Metrics], None],
        log_every: int,
        performance: Callable[[float], Metrics],
        skips: bool = False,
        callbacks: Callbacks | None = None,
        spikes: str = "off",
    ) -> None:
        self.callbacks = callbacks or Callbacks()
        self.timelines = self.callbacks.of(Timelines) or Timelines(Path(), ())
        self._log = log
        self.wall = self.callbacks.of(WallClock) or WallClock(Goodput(), time.time())
        self._skips, self._spikes = skips, spikes
        self._skipped_in_a_row, self._spiked = 0, False
        self._log_every = log_every
        self._performance = performance
        self._unlogged: tuple[int, Metrics] | None = None
        self.finished_steps = 0
        self.first_step_at: float | None = None

    def begin(self, finished_steps: int) -> None:
        """Forget the steps after `finished_steps`, from which the run resumes."""
        self._unlogged, self._skipped_in_a_row, self._spiked = None, 0, False
        self.finished_steps = finished_steps

    def record(self, result: StepResult | None) -> None:
        """Take one step's result; None is ignored.

        Raises:
            DivergedError: a value is not finite, and training cannot continue from it.
            SpikeError: the step is a spike, and training is not to continue from it.
            ReplicaError: replicas of the state differ after the step.
        """
        if result is None:
            return
        self.finished_steps = result.step
        self.first_step_at = self.first_step_at or result.completed_at
        kept = [each for each in result.recordings if each.step in self.timelines.steps]
        self.timelines.add(kept)
        if slowness := self.callbacks.of(Slowness):
            slowness.add(result, [each for each in result.recordings if each not in kept])
        rates = self._performance(result.metrics["perf/step_seconds"])
        metrics: Metrics = {**result.metrics, **rates}
        self._unlogged = result.step, metrics
        try:
            check_equal(result.copies, f"step {result.step}: ")
        except ReplicaError:
            self.log_newest()
            raise
        bad = [key for key in FINITE if not math.isfinite(result.metrics[key])]
        spiked = result.metrics.get(SCORE, 0.0) > LIMIT
        if bad or spiked or result.step % self._log_every == 0 or "eval/loss" in result.metrics:
            self.log_newest()
        is_skipped = bad or (spiked and self._spikes == "skip")
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if is_skipped else 0
        if bad:
            key, value = bad[0], result.metrics[bad[0]]
            if not self._skips or self._skipped_in_a_row > MOST_SKIPPED:
                raise DivergedError(key, value, result.step)
            _log.warning(f"step {result.step}: {key} is {value}, the update is skipped")
        elif spiked:
            self._meet_spike(result)
        self._spiked = spiked
        self.callbacks.call("on_step", result.step, metrics)
        if "eval/loss" in metrics:
            self.callbacks.call("on_evaluation", result.step, metrics)

    def _meet_spike(self, result: StepResult) -> None:
        """Respond as `train.spikes` says; warn of the first of several in a row that stay."""
        if self._spikes == "rollback" or self._skipped_in_a_row > MOST_SKIPPED:
            raise SpikeError(result.metrics, result.step)
        text = spike_text(result.metrics, result.step)
        if self._spikes == "skip":
            _log.warning(f"{text}; the update is skipped")
        elif not self._spiked:
            _log.warning(text)

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


def is_evaluated(step: int, settings: Train) -> bool:
    """Return whether an evaluation follows `step`: every so many steps, and after the last one."""
    every = settings.eval_every
    return every > 0 and (step % every == 0 or step == settings.steps)


def profiled_step(steps: int, finished: int, recorded: Set[int] = frozenset()) -> int | None:
    """Return the step that is run task by task to time the stages.

    It is the second, which is warm; or the next one that is not `recorded`, and None if there is
    none.
    """
    last = min(finished + 2, steps)
    return next((k for k in (*range(last, steps + 1), finished + 1) if k not in recorded), None)


def warm_up(finished: int, dry_steps: int = 0) -> range:
    """Return the first steps after a start at `finished`, whose times are not representative.

    The first is cold, unless dry steps came before it; the second is profiled, and the third was
    queued behind the second.
    """
    return range(finished + (2 if dry_steps else 1), finished + 4)


class Pace(Callback):
    """Tells from the newest steps how long one may take before its workers are taken to hang.

    That is `_PATIENCE` times the slowest of them. A step at which the run has failed gets as many
    times more, so that a rare pause, such as of the data, cannot end the run.

    Args:
        unusual: steps that say nothing of the pace and are not judged by it; it may grow.
        least: the seconds that every step may take.
    """

    def __init__(self, unusual: Collection[int] = (), least: float = 0.0) -> None:
        self._unusual, self._least = unusual, max(least, _LEAST_SECONDS)
        self._seconds: deque[float] = deque(maxlen=_PACE_STEPS)
        self._newest = self._failed_by = 0

    def limit(self, step: int) -> float | None:
        """Return the seconds that `step` may take; None before enough steps are known."""
        if step in self._unusual or len(self._seconds) < _FEWEST:
            return None
        seconds = max(self._least, round(_PATIENCE * max(self._seconds), 1))
        return seconds * (_PATIENCE if step <= self._failed_by else 1)

    def forget(self) -> None:
        """Forget the steps so far: those that come are of another plan."""
        self._seconds.clear()

    def on_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Take the time of a step."""
        self._newest = step
        if step not in self._unusual:
            self._seconds.append(metrics.get("perf/step_seconds") or 0.0)

    def on_restart(self, step: int, why: str) -> None:
        """Note that one of the steps under way has failed."""
        self._failed_by = self._newest + _UNDER_WAY


class Timelines(Callback):
    """Writes the timeline of a step once all workers have handed theirs in.

    Other steps in the file, perhaps of an earlier start of the run, stay.

    Args:
        folder: the run's folder.
        steps: the steps to record.
        traced: the steps of which JAX's profiler writes a trace.
        take: called with each complete step and the spans of each process, on one clock.

    Attributes:
        steps: the steps to record.
        traced: as given.
        traces: the folder of the profiler's traces.
        spans: takes what the driver does.
    """

    def __init__(
        self,
        folder: Path,
        steps: Iterable[int],
        traced: Iterable[int] = (),
        take: Callable[[int, Sequence[ProcessSpans]], None] = lambda step, parts: None,
    ) -> None:
        self.steps, self.traced = frozenset(steps), frozenset(traced)
        self.traces = folder / TRACES
        self._take = take
        self.spans = SpanRecorder()
        self._path = folder / FILE
        self._clocks: Sequence[Clock] = ()
        self._found: dict[int, dict[int, Recording]] = {}

    @property
    def all(self) -> frozenset[int]:
        """All steps that are recorded or traced."""
        return self.steps | self.traced

    def start(self, step: int) -> tuple[bool, str | None]:
        """Begin a step; return whether it is recorded, and the folder for its trace, if any."""
        if step in self.steps:
            self.spans.start()
        return step in self.steps, str(self.traces.absolute()) if step in self.traced else None

    def begin(self, clocks: Sequence[Clock]) -> None:
        """Begin an attempt, whose workers have these clocks; forget what the one before left."""
        self._clocks, self._found = clocks, {}

    def add(self, recordings: Iterable[Recording]) -> None:
        """Take recordings of workers; a complete step is written."""
        for recording in recordings:
            parts = self._found.setdefault(recording.step, {})
            parts[recording.process] = recording
            if len(parts) >= len(self._clocks):
                self._write(recording.step, [parts[i] for i in sorted(parts)])

    def on_end(self, step: int, reason: str) -> None:
        """Warn of steps that are not in the file, as a worker did not send its part."""
        for recorded, parts in self._found.items():
            missing = [f"worker {i}" for i in range(len(self._clocks)) if i not in parts]
            if missing:
                whose = ", ".join(missing)
                _log.warning(f"no timeline of step {recorded}: what {whose} recorded has not come")

    def _write(self, step: int, recordings: Sequence[Recording]) -> None:
        parts = [
            ProcessSpans(f"worker {recording.process}", recording.spans, clock)
            for recording, clock in zip(recordings, self._clocks, strict=True)
        ]
        timeline = read_timeline(self._path).with_step(step, parts)
        own = self.spans.take()
        if not (ran := timeline.spans(step)):
            return
        first, last = ran[0].start, max(span.end for span in ran)
        during = [
            replace(span, start=max(span.start, first))
            for span in own
            if span.end > first and span.start < last
        ]
        timeline = timeline.with_step(step, [ProcessSpans("driver", during, Clock()), *parts])
        try:
            timeline.save(self._path)
        except OSError as error:
            _log.warning(f"the timeline of step {step} cannot be written: {error}")
        self._take(step, timeline.steps[step])
