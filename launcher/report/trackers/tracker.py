"""The interface of everything that records a run, and the keys of its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Metrics = Mapping[str, float | None]

# The keys of every logged step, in the order in which they are written. A step may have more:
# `eval/loss`, `pipeline/stage_<i>_seconds`, `train/<name>`.
METRIC_KEYS = (
    "step",
    "train/loss",
    "train/grad_norm",
    "train/learning_rate",
    "perf/step_seconds",
    "perf/samples_per_second",
    "perf/tokens_per_second",
    "perf/tokens",
    "perf/mfu",
    "perf/peak_memory_bytes",
    "data/wait_seconds",
    "pipeline/bubble_fraction",
)


class Tracker:
    """Records one run.

    Every tracker of a run is handed the same things in the same order. The methods of this class
    do nothing: override those whose input the tracker can hold.
    """

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table: the plan's before the first step, what was measured after the last."""

    def rewind(self, first_step: int) -> None:
        """Go back after a restart: `first_step` and the steps after it are logged again."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of one step.

        Args:
            step: the number of finished steps, 1 after the first.
            metrics: values by the keys of `METRIC_KEYS` but `step`, and more; None is unknown.
        """

    def image(self, name: str, path: Path) -> None:
        """Record a PNG file, after the last step."""

    def artifact(self, name: str, path: Path) -> None:
        """Record a file or a folder of the run under a name such as "plan", after the last step."""

    def alert(self, title: str, text: str) -> None:
        """Tell the user at once of what is out of the ordinary: a restart, a loss that is nan."""

    def summary_fields(self) -> Mapping[str, Any]:
        """Return the fields of `Summary` that only this tracker knows, such as its URL.

        It is asked when it is opened.
        """
        return {}

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Record the run's summary and release what is held.

        Args:
            summary: the content of `summary.json`; empty where only an attempt has ended.
        """


@dataclass(frozen=True)
class CompositeTracker(Tracker):
    """Passes everything on to several trackers, in order."""

    trackers: tuple[Tracker, ...]

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table with every tracker."""
        for tracker in self.trackers:
            tracker.table(name, columns, rows)

    def rewind(self, first_step: int) -> None:
        """Go back with every tracker."""
        for tracker in self.trackers:
            tracker.rewind(first_step)

    def log(self, step: int, metrics: Metrics) -> None:
        """Record a step with every tracker."""
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def image(self, name: str, path: Path) -> None:
        """Record a picture with every tracker."""
        for tracker in self.trackers:
            tracker.image(name, path)

    def artifact(self, name: str, path: Path) -> None:
        """Record a file or a folder with every tracker."""
        for tracker in self.trackers:
            tracker.artifact(name, path)

    def alert(self, title: str, text: str) -> None:
        """Tell of something by every tracker."""
        for tracker in self.trackers:
            tracker.alert(title, text)

    def summary_fields(self) -> dict[str, Any]:
        """Return the fields of all trackers together."""
        fields: dict[str, Any] = {}
        for tracker in self.trackers:
            fields.update(tracker.summary_fields())
        return fields

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Finish every tracker, even where one fails; its error is raised at the end."""
        with ExitStack() as stack:
            for tracker in reversed(self.trackers):
                stack.callback(tracker.finish, summary)
