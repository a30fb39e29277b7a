"""Breakdown of a running training's time, written to its folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from launcher.config.schema import Config
from launcher.driver.folder.folder import RunFolder
from launcher.driver.record.wall_clock import WallClock, with_lost
from launcher.plan import Plan
from launcher.report.breakdown import (
    Goodput,
    Known,
    StepBreakdown,
    break_down,
    read_breakdown,
)
from launcher.report.jsonl import METRICS, read_metrics
from launcher.report.pages.timeline import FILE, ProcessSpans, read_timeline

_log = logging.getLogger(__name__)


class Accounts:
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
        length = getattr(config.model, "sequence_length", None)
        samples = config.train.global_batch_size
        self._known = Known(samples, length and samples * length)
        self._recorded: tuple[int | None, Sequence[ProcessSpans]] | None = None
        self.wall = WallClock(
            _before(home, config, plan.num_devices), psutil.Process().create_time()
        )
        self.wall.lap("starting")
        self.wall.move(plan_seconds, "starting", "planning")

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
