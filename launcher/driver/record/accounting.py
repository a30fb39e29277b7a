"""Breakdown of a running training's time into phases, written to its folder."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from launcher.config.schema import Config
from launcher.driver.callback import Callback
from launcher.driver.folder.folder import RunFolder
from launcher.driver.record.faults import NO_FAULTS, Faults, expected_faults
from launcher.plan import Plan
from launcher.report.breakdown import Goodput, Known, StepBreakdown, break_down, read_breakdown
from launcher.report.jsonl import METRICS, read_metrics
from launcher.report.pages.timeline import FILE, ProcessSpans, read_timeline

_log = logging.getLogger(__name__)
_MOST_LOST = 100_000  # steps since a checkpoint


class Accounting:
    """Writes `accounting.json` after each recorded step, before each save, and in the end.

    Args:
        home: the run's folder.
        config: the run's settings.
        plan: the plan in use.
        plan_seconds: the time that planning took.

    Attributes:
        wall: counts the run's wall time.
    """

    def __init__(self, home: RunFolder, config: Config, plan: Plan, plan_seconds: float) -> None:
        self._folder, self._config, self._plan = home.path, config, plan
        self._finished = home.finished_steps
        self._known = Known(config.train.global_batch_size, batch_tokens(config))
        self._recorded: tuple[int | None, Sequence[ProcessSpans]] | None = None
        before, began = _before(home, config, plan.held_devices), psutil.Process().create_time()
        self.wall = WallClock(before, began, faults=faults_of(config, plan))
        self.wall.lap("starting")
        self.wall.move(plan_seconds, "starting", "planning")

    def follow(self, plan: Plan) -> None:
        """Take another plan, of which no step is recorded."""
        self._plan, self._recorded = plan, (None, ())

    def record(self, step: int, parts: Sequence[ProcessSpans]) -> None:
        """Take a recorded step, and write the breakdown."""
        self._recorded = step, parts
        self.write(self._finished)

    def started(self, compile_seconds: float | None) -> None:
        """Note that an attempt is ready to train."""
        self.wall.lap("starting")
        self.wall.move(compile_seconds or 0.0, "starting", "compiling")

    def write(self, finished: int) -> None:
        """Write the breakdown after `finished` steps; a full disk costs a warning."""
        self._finished = finished
        _save(self.result(self._folder, {}), self._folder)

    def result(self, folder: Path, measured: Mapping[str, Any]) -> StepBreakdown:
        """Return the breakdown as far as it is known.

        Args:
            folder: the run's folder.
            measured: the fields of the summary that were measured.
        """
        if self._recorded is None:  # read once: this is called before each save
            self._recorded = _newest(folder)
        step, parts = self._recorded
        known = replace(
            self._known,
            median_step_seconds=measured.get("step_seconds_median"),
            saves_seconds=self.wall.held_up / max(1, self.wall.steps),
            memory_now=measured.get("memory_bytes"),
            memory_peak=measured.get("peak_memory_bytes"),
        )
        found = break_down(self._plan, known, step, parts, self.wall.good)
        return replace(found, finished_steps=self._finished)

    def finish(self, folder: Path, finished: int, measured: Mapping[str, Any]) -> StepBreakdown:
        """Return the breakdown of the run, and write it; call it last.

        A full disk costs a warning here, too.
        """
        self.wall.lap("starting")
        self._finished = finished
        found = self.result(folder, measured)
        if os.path.isdir(folder):
            _save(found, folder)
        return found


def faults_of(config: Config, plan: Plan) -> Faults:
    """Return the faults that are expected of a run by a plan."""
    hosts = int(plan.cluster["hosts"])
    return expected_faults(config.cluster.hours_between_faults, hosts, plan.num_parameters)


def expected_fields(config: Config, faults: Faults, step_seconds: float) -> dict[str, Any]:
    """Return the fields of a summary for all steps of a run, with its saves and faults.

    Args:
        config: the run's settings.
        faults: the faults that are expected.
        step_seconds: the time of a step.
    """
    whole, saves = config.train.steps * step_seconds, config.train.checkpoint
    minutes = saves.every_minutes
    by_time = faults.save_interval if minutes is None else 60 * minutes
    intervals = [by_time, saves.every_steps * step_seconds]
    goodput = faults.goodput(min([whole, *filter(None, intervals)]))
    return {"expected_goodput": goodput, "expected_seconds": whole / max(goodput, 1e-9)}


def batch_tokens(config: Config) -> int | None:
    """Return the tokens of a batch, None where samples have none."""
    length = getattr(config.model, "sequence_length", None)
    return length and config.train.global_batch_size * length


def _save(found: StepBreakdown, folder: Path) -> None:
    try:
        found.save(folder)
    except OSError as error:
        _log.warning(f"the accounting cannot be written: {error}")


def _newest(folder: Path) -> tuple[int | None, Sequence[ProcessSpans]]:
    """Return the newest step that an earlier start has recorded, if one has."""
    steps = read_timeline(folder / FILE).steps
    return (max(steps), steps[max(steps)]) if steps else (None, ())


def _before(home: RunFolder, config: Config, devices: int) -> Goodput:
    """Return the wall time of the run's earlier starts, divided."""
    price = config.cluster.price_per_device_hour
    earlier = read_breakdown(home.path)
    if earlier is None:
        return Goodput(devices=devices, price_per_device_hour=price)
    records = read_metrics(home.path / METRICS)
    good = with_lost(earlier.goodput, earlier.finished_steps, home.finished_steps, records)
    return replace(good, devices=devices, price_per_device_hour=price)


class WallClock(Callback):
    """Counts each moment of a run in one phase, from one `lap` to the next.

    Args:
        before: of the run's earlier starts.
        began: when this process began, in seconds since the epoch.
        clock: returns seconds since the epoch.
        faults: what is expected before a save is measured.

    Attributes:
        good: the time by phases, up to the last lap.
        held_up: seconds for which saves held training up, of this process.
        steps: the steps that this process has made, each as often as it made it.
    """

    def __init__(
        self,
        before: Goodput,
        began: float,
        clock: Callable[[], float] = time.time,
        faults: Faults = NO_FAULTS,
    ) -> None:
        self._faults, self._saves = faults, 0
        self.good, self.held_up, self.steps = before, 0.0, 0
        self._clock, self._at = clock, began
        # The newest steps and their seconds: a failure may lose them.
        self._newest: deque[tuple[int, float]] = deque(maxlen=_MOST_LOST)

    def lap(self, phase: str) -> float:
        """Count the time since the last lap to a phase of `Goodput`; return its seconds."""
        now = self._clock()
        seconds, self._at = max(0.0, now - self._at), now
        self.good = self.good.with_seconds(phase, seconds)
        return seconds

    def move(self, seconds: float, source: str, target: str) -> None:
        """Move seconds from one phase to another, at most all of them."""
        self.good = self.good.moved(seconds, source, target)

    def save(self) -> None:
        """Count the time since the last lap as held up by a save."""
        self.held_up += self.lap("saving")
        self._saves += 1

    @property
    def faults(self) -> Faults:
        """The faults that are expected, with the mean time that a save here holds training up."""
        each = self.held_up / self._saves if self._saves else self._faults.save_seconds
        return replace(self._faults, save_seconds=each)

    def step(self, step: int, metrics: Mapping[str, float], evaluated: bool = False) -> None:
        """Count the time since the last lap to training, without the wait for data.

        Args:
            step: the step that ended.
            metrics: its metrics.
            evaluated: whether an evaluation followed it, and ended; what the step took is then in
                the evaluation's time.
        """
        seconds = self.lap("training")
        if evaluated:
            seconds = min(metrics.get("perf/step_seconds", 0.0), self.good.evaluating_seconds)
            self.move(seconds, "evaluating", "training")
        stalled = min(metrics.get("data/stall_seconds", 0.0), seconds)
        self.move(stalled, "training", "data")
        self._newest.append((step, seconds - stalled))
        self.steps += 1

    def on_restart(self, step: int, why: str) -> None:
        """Count the work after `step` as redone."""
        lost = sum(seconds for lost, seconds in self._newest if lost > step)
        self.move(lost, "training", "redone")
        self._newest.clear()


def with_lost(
    before: Goodput, counted: int, finished: int, records: Iterable[Mapping[str, Any]]
) -> Goodput:
    """Correct an earlier start's time by its metrics, once it is known which steps count.

    A killed attempt never reported its last steps; they are recovered from the metrics.

    Args:
        before: the time as reported.
        counted: the newest step in that report.
        finished: the newest step that a checkpoint holds.
        records: its logged steps.
    """
    last = 0
    for record in records:
        step, seconds = record["step"], record.get("perf/step_seconds") or 0.0
        seconds *= step - last
        last = step
        if step > counted:
            before = before.with_seconds("training", seconds)
        if step > finished:
            before = before.moved(seconds, "training", "redone")
    return before
