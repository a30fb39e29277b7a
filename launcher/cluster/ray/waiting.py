"""Waiting for processes to come up: how long, what is said meanwhile, and what ends it.

`session` waits so, from its first process to the last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

_POLL_SECONDS = 0.2
_SILENCE, _AGAIN = 10.0, 30.0  # seconds after which it is said what is waited for, and again


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Patience:
    """What a start may take.

    Attributes:
        seconds: in all; `setting` says so. say: told what is waited for, where it lasts.
        check: called while it is waited; what it raises ends the wait.
    """

    seconds: float = 180.0
    setting: str = "cluster.start_timeout"
    say: Callable[[str], None] = _nothing
    check: Callable[[], None] = _nothing


class Waiting:
    """The waits of one start, which share its time."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._left = patience.seconds

    def until(
        self, ready: Callable[[float], object], what: str, seconds: float | None = None
    ) -> bool:
        """Wait until `ready`, which waits so many seconds itself, says so. Returns whether it did
        in time: `seconds`, else what is left of the start's.

        The time is counted in calls, not by the clock: while this process is stopped, so may be
        the others.
        """
        patience, calls, waited, spoken = self._patience, 0, 0.0, _SILENCE
        limit = self._left if seconds is None else seconds
        while not (is_ready := ready(_POLL_SECONDS)):
            patience.check()
            calls += 1
            waited = calls * _POLL_SECONDS
            if waited >= limit:
                break
            if waited >= spoken:
                spoken += _AGAIN
                patience.say(f"waiting for {what}: {waited:.0f} s so far, at most {limit:.0f} s")
        if is_ready:
            patience.check()
        if seconds is None:
            self._left -= waited
        return bool(is_ready)


class Aside:
    """A call in a thread of its own, where no signal interrupts it, and which can be given up."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._over = threading.Event()  # not `Thread.join`, which an interrupt leaves for good
        try:
            threading.Thread(target=self._run, daemon=True).start()
        except RuntimeError:  # some Pythons start none while they exit
            self._run()

    def ended(self, seconds: float) -> bool:
        """Whether it is over, after waiting for it so long."""
        return self._over.wait(seconds)

    def finish(self) -> None:
        """Wait for it however often that is interrupted, and raise the last interrupt then."""
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
