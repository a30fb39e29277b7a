"""Wait for processes to come up, within a limit, with a line logged now and then."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from launcher.base import Advance

_POLL_SECONDS = 0.2
_SILENCE, _AGAIN = 10.0, 30.0  # seconds before a wait is first reported, and between reports

_log = logging.getLogger(__name__)


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class StartLimit:
    """The time that a start may take without progress, and a check that may end its waits.

    Attributes:
        seconds: the time until Ray is up, until it answers, until one more process is up.
        setting: the name by which the user knows `seconds`.
        check: called repeatedly during a wait; an exception that it raises ends the wait.
    """

    seconds: float = 120.0
    setting: str = "cluster.start_timeout"
    check: Callable[[], None] = _nothing


class Waiting:
    """The waits of one start.

    Attributes:
        advance: called with the number of processes or nodes that are up, and their total.
    """

    def __init__(self, limit: StartLimit, advance: Advance | None = None) -> None:
        self._limit, self.advance = limit, advance
        self._up, self._calls, self._spoken = 0, 0, _SILENCE

    def counts(self, up: int, total: int, unit: str) -> None:
        """Note how many processes are up; more of them is progress."""
        if up > self._up:
            self._up, self._calls, self._spoken = up, 0, _SILENCE
        if self.advance is not None:
            self.advance(up, total, unit)

    def until(
        self, ready: Callable[[float], object], what: str, seconds: float | None = None
    ) -> bool:
        """Wait until `ready` returns true; return whether it did in time.

        The time is counted in calls, not by the clock: while this process is stopped, the others
        may be too.

        Args:
            ready: waits up to as many seconds as it is given.
            what: the goal of the wait, in words.
            seconds: its limit, if it is not the start's.
        """
        start = self._limit
        limit = start.seconds if seconds is None else seconds
        self._up, self._calls, self._spoken = 0, 0, _SILENCE
        while not ready(_POLL_SECONDS):
            start.check()
            self._calls += 1
            waited = self._calls * _POLL_SECONDS
            if waited >= limit:
                return False
            if waited >= self._spoken:
                self._spoken += _AGAIN
                _log.info(f"waiting for {what}: {waited:.0f} s so far, at most {limit:.0f} s")
        start.check()
        return True


class BackgroundCall:
    """A call in a thread of its own, which no signal interrupts and which can be given up."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._over = threading.Event()  # an interrupted `Thread.join` cannot be resumed
        try:
            threading.Thread(target=self._run, daemon=True).start()
        except RuntimeError:  # some Pythons start none while they exit
            self._run()

    def ended(self, seconds: float) -> bool:
        """Wait up to `seconds` seconds for the call; return whether it is over."""
        return self._over.wait(seconds)

    def finish(self) -> None:
        """Wait for the call however often that is interrupted, then raise the last interrupt."""
        interrupt = None
        while not self._over.is_set():
            try:
                self._over.wait()
            except KeyboardInterrupt as error:
                interrupt = error
        self.result()
        if interrupt is not None:
            raise interrupt

    def result(self) -> None:
        """Raise the exception of the call, if any."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error
        self._over.set()
