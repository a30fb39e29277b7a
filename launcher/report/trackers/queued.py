"""A tracker on a thread of its own, behind a bounded queue: however slow, it holds nothing up."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.report.trackers.tracker import Metrics, Tracker

LONGEST = 10_000  # calls that wait; those that come while so many do are left out
FINISH_SECONDS = 90.0  # by which a tracker may delay the end of the run

_log = logging.getLogger(__name__)


class QueuedTracker(Tracker):
    """Passes everything on to a tracker, in order, on one thread; only `finish` waits for it.

    Args:
        name: what messages call the tracker.
        tracker: the tracker; what its methods raise must be caught.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(LONGEST)
        self._left_out = 0
        self._fields = tracker.summary_fields()  # as long as it has no time to be asked again
        # A thread that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table soon."""
        self._put(lambda: self._tracker.table(name, columns, rows))

    def rewind(self, first_step: int) -> None:
        """Go back soon."""
        self._put(lambda: self._tracker.rewind(first_step))

    def log(self, step: int, metrics: Metrics) -> None:
        """Record a step soon."""
        self._put(lambda: self._tracker.log(step, metrics))

    def image(self, name: str, path: Path) -> None:
        """Record a picture soon."""
        self._put(lambda: self._tracker.image(name, path))

    def artifact(self, name: str, path: Path) -> None:
        """Record a file or a folder soon."""
        self._put(lambda: self._tracker.artifact(name, path))

    def alert(self, title: str, text: str) -> None:
        """Tell of something soon."""
        self._put(lambda: self._tracker.alert(title, text))

    def summary_fields(self) -> Mapping[str, Any]:
        """Return the tracker's fields as they were when it was opened."""
        return self._fields

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Finish the tracker after all that it was handed; wait for it, at most `FINISH_SECONDS`.

        What it does not get done by then is said, and left.
        """
        if not self._thread.is_alive():
            return
        if self._left_out:
            _log.warning(f"{self._name}: {self._left_out} records are left out, as it is too slow")
        deadline = time.monotonic() + FINISH_SECONDS
        with suppress(queue.Full):
            for call in (lambda: self._tracker.finish(summary), None):
                self._calls.put(call, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            _log.warning(
                f"{self._name}: it takes over {FINISH_SECONDS:g} s to finish; "
                "what it has not recorded by now is left out"
            )

    def _put(self, call: Callable[[], object]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._left_out += 1

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
