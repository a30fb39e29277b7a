"""Interface of everything that records a run, and the keys of its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

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


@dataclass(frozen=True)
class TrackedRun:
    """A run as its trackers see it.

    Attributes:
        id: the run's id.
        folder: the run's folder.
        config: the resolved settings, without the values of `cluster.slurm.env`.
    """

    id: str
    folder: Path
    config: Mapping[str, Any]


class Tracker:
    """Records one run.

    Every tracker of a run receives the same calls in the same order. The methods of this class do
    nothing: override those whose input the tracker can hold.

    Attributes:
        needs: modules that the tracker imports and that not every installation has.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table: the plan's before the first step, the measured ones after the last."""

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
        """Alert the user at once: to a restart, or a loss that is not finite."""

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


class ForwardingTracker(Tracker):
    """Forwards every call; subclasses define how in `forward`."""

    def forward(self, call: Callable[[Tracker], None]) -> None:
        """Make `call` on the tracker or trackers behind this one."""
        raise NotImplementedError

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Forward a table."""
        self.forward(lambda to: to.table(name, columns, rows))

    def rewind(self, first_step: int) -> None:
        """Forward a restart."""
        self.forward(lambda to: to.rewind(first_step))

    def log(self, step: int, metrics: Metrics) -> None:
        """Forward the metrics of a step."""
        self.forward(lambda to: to.log(step, metrics))

    def image(self, name: str, path: Path) -> None:
        """Forward a picture."""
        self.forward(lambda to: to.image(name, path))

    def artifact(self, name: str, path: Path) -> None:
        """Forward a file or folder."""
        self.forward(lambda to: to.artifact(name, path))

    def alert(self, title: str, text: str) -> None:
        """Forward an alert."""
        self.forward(lambda to: to.alert(title, text))


@dataclass(frozen=True)
class CompositeTracker(ForwardingTracker):
    """Forwards every call to several trackers, in order."""

    trackers: tuple[Tracker, ...]

    def forward(self, call: Callable[[Tracker], None]) -> None:
        """Make `call` on every tracker."""
        for tracker in self.trackers:
            call(tracker)

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
