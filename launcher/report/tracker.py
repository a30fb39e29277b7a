"""The one protocol of whatever records a run, and the contract's metric keys.

`launcher.train` logs through a `Tracker` and never asks which; `jsonl`, `console` and
`wandb_tracker` are the kinds there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

Metrics = Mapping[str, float | None]

# The keys of every logged step, in the order in which they are written. A step may bring more of
# its own: `eval/loss`, `pipeline/stage_<i>_seconds`, `train/<name>`.
METRIC_KEYS = (
    "step",
    "train/loss",
    "train/grad_norm",
    "train/learning_rate",
    "perf/step_seconds",
    "perf/samples_per_second",
    "perf/tokens_per_second",
    "perf/mfu",
    "perf/peak_memory_bytes",
    "data/wait_seconds",
    "pipeline/bubble_fraction",
)


class Tracker(Protocol):
    """Records one run, step by step."""

    def log(self, metrics: Metrics) -> None:
        """Record one step. `step` counts finished steps, so the first is 1; None is unknown."""

    def message(self, text: str) -> None:
        """Say one line to a person; a recorder of numbers ignores it."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Record the run's end and let go of everything held. A second call does nothing."""


@dataclass(frozen=True)
class CompositeTracker:
    """Passes everything on to several trackers, in order."""

    trackers: tuple[Tracker, ...]

    def log(self, metrics: Metrics) -> None:
        for tracker in self.trackers:
            tracker.log(metrics)

    def message(self, text: str) -> None:
        for tracker in self.trackers:
            tracker.message(text)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Finish every tracker, also when one of them fails; its error is raised at the end."""
        with ExitStack() as stack:
            for tracker in reversed(self.trackers):
                stack.callback(tracker.finish, summary)
