"""The best evaluation so far, which decides on the checkpoint to keep and on an early end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher import checkpoint
from launcher.config.sections import Train
from launcher.driver.callback import Callback
from launcher.recipes import InputError
from launcher.report.jsonl import METRICS, read_metrics
from launcher.report.run_record import STOPPED_EARLY

_ANY = "eval/loss"  # of every evaluation


class Best(Callback):
    """Follows a metric of the evaluations: one that is named an accuracy rises, any other falls.

    Args:
        settings: the section `train`.
        folder: the run's folder, whose metrics hold earlier evaluations.

    Attributes:
        step: the step of the best evaluation; None before the first one.
        value: its metric.
        reason: why the run is to end early, None while it is not.
    """

    def __init__(self, settings: Train, folder: Path) -> None:
        self._metrics = folder / METRICS
        self._keeps, self._patience = settings.keep_best is not None, settings.stop_early
        self._setting = settings.keep_best or "eval_loss"
        self.metric = self._setting.replace("eval_", "eval/", 1)
        self._sign = -1.0 if "accuracy" in self._setting else 1.0
        self._forget()

    def on_start(self, step: int, folder: Path) -> None:
        """Read the evaluations up to `step` from the run's metrics."""
        self.on_restart(step, "")

    def on_restart(self, step: int, why: str) -> None:
        """Return to the evaluations up to `step`."""
        self._forget()
        for record in read_metrics(self._metrics) if step else ():
            if record["step"] <= step:
                self.on_evaluation(record["step"], record)

    def _forget(self) -> None:
        self.step: int | None = None
        self.value = float("nan")
        self.reason: str | None = None
        self._since = 0

    @property
    def follows(self) -> bool:
        """Whether the loop must wait for each evaluation's result."""
        return self._keeps or self._patience > 0

    def is_to_keep(self, step: int) -> bool:
        """Return whether the state after a step is the best, and is to be saved."""
        return self._keeps and self.step == step

    def on_save(self, step: int, path: Path) -> None:
        """Mark the checkpoint of the best evaluation, which then stays."""
        if self.is_to_keep(step):
            checkpoint.write_best(path.parent, step, self.metric, self.value)

    def on_evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Compare an evaluation with the best one.

        Raises:
            InputError: its evaluation does not have the metric.
        """
        if _ANY not in metrics or not self.follows:
            return
        if self.metric not in metrics:
            there = [name.replace("/", "_") for name in metrics if name.startswith("eval/")]
            raise InputError(
                f"train.keep_best={self._setting} is not a metric of this model's evaluations; "
                f"it is one of {', '.join(there)}"
            )
        value = metrics[self.metric]
        if value is not None and (self.step is None or self._sign * (value - self.value) < 0):
            self.step, self.value, self._since = step, float(value), 0
        else:
            self._since += 1
        if self._patience and self._since >= self._patience:
            several = "" if self._since == 1 else "s"
            self.reason = (
                f"{STOPPED_EARLY}: {self._setting} is no better than the {self.value:.6g} of step "
                f"{self.step} after {self._since} further evaluation{several}"
            )
