"""Waits for processes to come up: their limit, the lines logged meanwhile, and what ends them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

_POLL_SECONDS = 0.2
_SILENCE, _AGAIN = 10.0, 30.0  # seconds before a wait is first reported, and between reports

_log = logging.getLogger(__name__)


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class StartLimit:
    """The time that a start may take, and what ends its waits before.

    Attributes:
        seconds: the time in all.
        setting: the name by which the user knows `seconds`.
        check: called again and again during a wait; what it raises ends the wait.
    """

    seconds: float = 180.0
    setting: str = "cluster.start_timeout"
    check: Callable[[], None] = _nothing


class Waiting:
    """The waits of one start, which share its time."""

    def __init__(self, limit: StartLimit) -> None:
        self._limit = limit
        self._left = limit.seconds

    def until(
        self, ready: Callable[[float], object], what: str, seconds: float | None = None
    ) -> bool:
        """Wait until `ready` returns true; return whether it did in time.

        The time is counted in calls, not by the clock: while this process is stopped, the others
        may be too.

        Args:
            ready: waits up to as many seconds as it is given.
            what: what is waited for, in words.
            seconds: the limit of this wait; None takes what is left of the start's time.
        """
        start, calls, waited, spoken = self._limit, 0, 0.0, _SILENCE
        limit = self._left if seconds is None else seconds
        while not (is_ready := ready(_POLL_SECONDS)):
            start.check()
            calls += 1
            waited = calls * _POLL_SECONDS
            if waited >= limit:
                break
            if waited >= spoken:
                spoken += _AGAIN
                _log.info(f"waiting for {what}: {waited:.0f} s so far, at most {limit:.0f} s")
        if is_ready:
            start.check()
        if seconds is None:
            self._left -= waited
        return bool(is_ready)


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
        """Wait up to so many seconds for the call; return whether it is over."""
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
        """Raise what the call raised."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error
        self._over.set()
