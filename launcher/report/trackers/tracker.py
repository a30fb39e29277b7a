"""Interface of everything that records a run, and the registry of trackers.

`report.trackers` names ours and users' classes; a registered tracker is opened for every run. None
can end a run or hold it up: each is called on a thread of its own, one that fails is reported once
and gets no more calls, and one that is slow gets what its queue holds. A tracker's warnings go to a
logger below `launcher`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from operator import methodcaller
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from launcher.base import first_line, lacking, not_run
from launcher.config.errors import ConfigError

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
        earlier: the steps before this start, as in `metrics.jsonl`: a tracker may lack some.
    """

    id: str
    folder: Path
    config: Mapping[str, Any]
    earlier: Sequence[Mapping[str, Any]] = ()


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


def _forwarded(name: str) -> Any:
    def method(self: ForwardingTracker, *given: Any, **named: Any) -> None:
        self.forward(methodcaller(name, *given, **named))

    return method


class ForwardingTracker(Tracker):
    """Forwards every call; subclasses define how in `forward`."""

    table, rewind, log = map(_forwarded, ("table", "rewind", "log"))
    image, artifact, alert = map(_forwarded, ("image", "artifact", "alert"))

    def forward(self, call: Callable[[Tracker], None]) -> None:
        """Make `call` on the tracker or trackers behind this one."""
        raise NotImplementedError


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
        return {k: v for tracker in self.trackers for k, v in tracker.summary_fields().items()}

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Finish every tracker, even where one fails; its error is raised at the end."""
        with ExitStack() as stack:
            for tracker in reversed(self.trackers):
                stack.callback(tracker.finish, summary)


LONGEST = 10_000  # calls in the queue; later ones are dropped until there is room
FINISH_SECONDS = 90.0  # by which a tracker may delay the end of the run
SUMMARY_FIELDS = ("wandb_url", "wandb_sync_command")  # that a tracker may set in the summary

_log = logging.getLogger(__name__)


class QueuedTracker(ForwardingTracker):
    """Forwards every call to a tracker, in order, on one thread; only `finish` waits for it.

    The tracker's first failure is reported in one line and ends its recording, never the run.

    Args:
        name: the tracker's name for messages.
        tracker: the tracker.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(LONGEST)
        self._left_out, self._failed = 0, False
        self._fields: dict[str, str] = {}
        self._attempt(self._ask_fields)
        # Daemon: a thread that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def forward(self, call: Callable[[Tracker], None]) -> None:
        """Queue a call, or drop it where the queue is full."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._left_out += 1

    def summary_fields(self) -> Mapping[str, Any]:
        """Return the tracker's fields as they were when it was opened."""
        return self._fields

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Finish the tracker after all calls in its queue; wait at most `FINISH_SECONDS`.

        Calls that are not done by then are dropped, with a warning.
        """
        if not self._thread.is_alive():
            return
        if self._left_out:
            _log.warning(f"{self._name}: {self._left_out} records are left out, as it is too slow")
        deadline = time.monotonic() + FINISH_SECONDS
        with suppress(queue.Full):
            for call in (lambda to: to.finish(summary), None):
                self._calls.put(call, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            _log.warning(
                f"{self._name}: it takes over {FINISH_SECONDS:g} s to finish; "
                "what it has not recorded by now is left out"
            )

    def _ask_fields(self, tracker: Tracker) -> None:
        fields = tracker.summary_fields()
        self._fields = {name: str(fields[name]) for name in SUMMARY_FIELDS if fields.get(name)}

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._attempt(call)

    def _attempt(self, call: Callable[[Tracker], object]) -> None:
        if self._failed:
            return
        try:
            if wrong := not_run(call(self._tracker)):
                raise TypeError(f"a method of it returns {wrong}")
        except (Exception, SystemExit) as error:  # so wandb passes on the end of its service
            self._failed = True
            _log.warning(f"{self._name}: {first_line(error)}; the run is no longer recorded there")


Opener = Callable[[TrackedRun], Tracker | None]
_AnyOpener = TypeVar("_AnyOpener", bound=Opener)

OURS = {  # imported when chosen
    "wandb": "launcher.report.trackers.wandb_tracker.open_wandb",
    "tensorboard": "launcher.report.trackers.tensorboard_tracker.TensorBoardTracker",
    "mlflow": "launcher.report.trackers.mlflow_tracker.MlflowTracker",
    "trackio": "launcher.report.trackers.trackio_tracker.TrackioTracker",
}
TRACKERS: dict[str, Opener] = {}


def register(name: str) -> Callable[[_AnyOpener], _AnyOpener]:
    """Register a tracker under a name, as a decorator.

    Args:
        name: the name for messages. A second tracker of the same name replaces the first.

    Returns:
        The decorator of a class or function that takes a `TrackedRun` and returns its `Tracker`, or
        None where the run is not to be recorded.
    """

    def decorate(opener: _AnyOpener) -> _AnyOpener:
        TRACKERS[name] = opener
        return opener

    return decorate


def openers(names: Iterable[str], users: bool = True) -> dict[str, Opener]:
    """Return the class or function that opens each tracker, by its name.

    Args:
        names: the setting `report.trackers`.
        users: whether to import users' classes, or to leave them out.

    Raises:
        ConfigError: there is no such class, its module cannot be imported, or a library that it
            needs is not installed; the message says how to install it.
    """
    return {name: _opener(name) for name in names if users or name in OURS}


def _opener(name: str) -> Opener:
    module, _, last = OURS.get(name, name).rpartition(".")
    try:
        opener: Opener = getattr(import_module(module), last)
        if not callable(opener):
            raise TypeError(f"{last} is not a class or function")
    except Exception as error:
        problem = f"report.trackers names {name}, which cannot be loaded: {error}"
        raise ConfigError(problem, "It is a class that takes a TrackedRun.") from error
    if command := lacking(*getattr(opener, "needs", ())):
        raise ConfigError(
            f"report.trackers names {name}, and a library that it needs is not installed",
            f"Install it with: {command}.",
        )
    return opener


def open_trackers(run: TrackedRun, chosen: Mapping[str, Opener]) -> tuple[Tracker, ...]:
    """Open trackers for a run; one that cannot be opened is reported.

    Args:
        run: the run.
        chosen: those that its settings choose, by name; the registered ones follow them.
    """
    opened = []
    for name, opener in {**chosen, **TRACKERS}.items():
        try:
            tracker = opener(run)
        except Exception as error:
            _log.warning(f"{name}: {first_line(error)}; the run is not recorded there")
            continue
        if tracker is not None:
            opened.append(QueuedTracker(name, tracker))
    return tuple(opened)
