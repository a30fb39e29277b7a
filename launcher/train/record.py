"""From what a worker measured of a step to what is logged of it. `loop` feeds it, `run` sums up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher.report.tracker import Metrics

if TYPE_CHECKING:
    from launcher.train.worker import StepResult


class DivergedError(Exception):
    """The loss or the gradient is no longer a number; what was saved before still is."""


class Recorder:
    """Logs every `log_every`-th step and the last one.

    Args:
        log: takes the metrics of one step.
        performance: the `perf/...` figures of a step that took so many seconds.

    Attributes:
        finished_steps: the newest step that is finished, 0 before the first.
        first_step_at: when the first step of this process was complete, seconds since the epoch.
    """

    def __init__(
        self,
        log: Callable[[Metrics], None],
        log_every: int,
        performance: Callable[[float], Metrics],
    ) -> None:
        self._log = log
        self._log_every = log_every
        self._performance = performance
        self._unlogged: Metrics | None = None
        self.finished_steps = 0
        self.first_step_at: float | None = None

    def record(self, result: StepResult | None) -> None:
        """Take in one step's result. Raises DivergedError where training cannot go on from it."""
        if result is None:
            return
        self.finished_steps = result.step
        self.first_step_at = self.first_step_at or result.completed_at
        rates = self._performance(result.metrics["perf/step_seconds"])
        self._unlogged = {"step": result.step, **result.metrics, **rates}
        for key in ("train/loss", "train/grad_norm"):
            if not math.isfinite(result.metrics[key]):
                self.log_newest()
                raise DivergedError(
                    f"{key} is {result.metrics[key]} at step {result.step}; lower "
                    "optimizer.learning_rate, or set optimizer.clip_norm or optimizer.warmup_steps"
                )
        if result.step % self._log_every == 0 or "eval/loss" in result.metrics:
            self.log_newest()

    def log_newest(self) -> None:
        """Log the newest step, where it has not been."""
        if self._unlogged:
            self._log(self._unlogged)
        self._unlogged = None
