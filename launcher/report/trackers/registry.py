"""The registry of trackers that record a run beside its folder and the console.

Each is opened once a run, in the order of registration, and called on a thread of its own. None of
them can end a run or hold it up: one that fails is reported once and left out from then on, one
that is slow gets what its queue holds. A tracker's warnings to the user go to a logger below
`launcher`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from launcher.report.trackers.queued import QueuedTracker
from launcher.report.trackers.tracker import Metrics, Tracker


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


Opener = Callable[[TrackedRun], Tracker | None]
_AnyOpener = TypeVar("_AnyOpener", bound=Opener)

_log = logging.getLogger(__name__)

TRACKERS: dict[str, Opener] = {}
NONE_CHOSEN: Mapping[str, Opener] = {}
SUMMARY_FIELDS = ("wandb_url", "wandb_sync_command")  # what a tracker may say in the summary


def register(name: str) -> Callable[[_AnyOpener], _AnyOpener]:
    """Register a tracker under a name, as a decorator.

    Args:
        name: what messages call it. A second tracker of the same name replaces the first.

    Returns:
        The decorator of a class or function that takes a `TrackedRun` and returns its `Tracker`, or
        None where the run is not to be recorded.
    """

    def decorate(opener: _AnyOpener) -> _AnyOpener:
        TRACKERS[name] = opener
        return opener

    return decorate


def open_trackers(
    run: TrackedRun, chosen: Mapping[str, Opener] = NONE_CHOSEN
) -> tuple[Tracker, ...]:
    """Open trackers for a run; one that cannot be opened is reported.

    Args:
        run: the run.
        chosen: those that its settings choose, by name; those that are registered follow them.
    """
    opened = []
    for name, opener in {**chosen, **TRACKERS}.items():
        try:
            tracker = opener(run)
        except Exception as error:
            _log.warning(f"{name}: {first_line(error)}; the run is not recorded there")
            continue
        if tracker is not None:
            opened.append(QueuedTracker(name, GuardedTracker(name, tracker)))
    return tuple(opened)


class GuardedTracker(Tracker):
    """Passes everything on to a tracker until it fails.

    Its first failure is reported in one line and ends its recording, never the run.

    Args:
        name: what the line calls the tracker.
        tracker: the tracker to guard.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._failed = False

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table, unless the tracker has failed."""
        self._attempt(lambda: self._tracker.table(name, columns, rows))

    def rewind(self, first_step: int) -> None:
        """Go back, unless the tracker has failed."""
        self._attempt(lambda: self._tracker.rewind(first_step))

    def log(self, step: int, metrics: Metrics) -> None:
        """Record a step, unless the tracker has failed."""
        self._attempt(lambda: self._tracker.log(step, metrics))

    def image(self, name: str, path: Path) -> None:
        """Record a picture, unless the tracker has failed."""
        self._attempt(lambda: self._tracker.image(name, path))

    def artifact(self, name: str, path: Path) -> None:
        """Record a file or a folder, unless the tracker has failed."""
        self._attempt(lambda: self._tracker.artifact(name, path))

    def alert(self, title: str, text: str) -> None:
        """Tell of something, unless the tracker has failed."""
        self._attempt(lambda: self._tracker.alert(title, text))

    def summary_fields(self) -> Mapping[str, Any]:
        """Return the tracker's fields, also after a failure: part of the run is recorded."""
        try:
            fields = self._tracker.summary_fields()
            return {name: str(fields[name]) for name in SUMMARY_FIELDS if fields.get(name)}
        except Exception as error:
            self._fail(error)
            return {}

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Finish the tracker, unless it has failed."""
        self._attempt(lambda: self._tracker.finish(summary))

    def _attempt(self, action: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            action()
        except (Exception, SystemExit) as error:  # wandb passes its service's end on as an exit
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failed:
            _log.warning(f"{self._name}: {first_line(error)}; the run is no longer recorded there")
        self._failed = True


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
