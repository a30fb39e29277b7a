"""Tracker on a thread of its own, behind a bounded queue, so that it cannot end or delay a run."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from launcher.report.trackers.tracker import ForwardingTracker, Tracker

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

    def _attempt(self, call: Callable[[Tracker], None]) -> None:
        if self._failed:
            return
        try:
            call(self._tracker)
        except (
            Exception,
            SystemExit,
        ) as error:  # wandb passes the end of its service on as an exit
            self._failed = True
            _log.warning(f"{self._name}: {first_line(error)}; the run is no longer recorded there")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
