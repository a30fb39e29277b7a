"""Signals that ask the process to end.

These are Ctrl-C (SIGINT), the scheduler's (SIGTERM, or SIGUSR1 and SIGUSR2 ahead of time), and that
of a closed terminal (SIGHUP). A process has one `Stop`, made before anything else is imported, so
this module imports the standard library only. The effect of a signal depends on what the process
is doing:

- Nothing has begun (settings are read, libraries are imported): the process ends at once, without
  an exception, which imports would turn into something else.
- `interruptible` work, which only computes and can be left anywhere: KeyboardInterrupt, again and
  again if it is swallowed (by garbage collection, imports, callbacks from C++). If code below
  Python does not react within `_PATIENCE` seconds, the whole process ends.
- `heeded` work, which has to end in good order: a line says that the signal was heard, and waits,
  which call `check`, end. A second Ctrl-C is a KeyboardInterrupt.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import _exit as exit_at_once
from types import FrameType
from typing import NamedTuple, NoReturn

# The exit code and the summary's `exit_reason` that each signal leads to.
ENDINGS = {
    signal.SIGINT: (130, "interrupted"),
    signal.SIGTERM: (75, "preempted"),
    signal.SIGHUP: (75, "preempted"),
    signal.SIGUSR1: (75, "preempted"),
    signal.SIGUSR2: (75, "preempted"),
}
_STOPPING = "launcher: stopping"
_PATIENCE = 0.8  # seconds
_AGAIN = 0.1
_SHOW_CURSOR = "\x1b[?25h"


class Stopped(KeyboardInterrupt):
    """The KeyboardInterrupt of a signal that has come.

    Being a class of its own, it can be referred to weakly, which shows when it is gone.
    """


class Stop:
    """Handles the signals of `ENDINGS` inside `with stop:`; in the main thread, one at a time.

    Attributes:
        requested: the first signal that came, or None.
        repeats: the number of Ctrl-C after it.
        last_words: returns what to write when the process ends at once, and the file descriptor.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.repeats = 0
        self.last_words: Callable[[], tuple[int, str]] = lambda: (1, f"{_STOPPING}\n")
        self._interruptible = False
        self._heeded: _Heeded | None = None
        self._raised: Callable[[], object] = lambda: None
        self._main = _thread.get_ident()
        # Under nohup SIGHUP is ignored, and stays so.
        can_hang_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        self._handled = [s for s in ENDINGS if s is not signal.SIGHUP or can_hang_up]
        self._on_terminal = [output for output in (1, 2) if os.isatty(output)]

    def __enter__(self) -> Stop:
        self._previous = {signum: signal.signal(signum, self._handle) for signum in self._handled}
        self._unraisable = sys.unraisablehook
        sys.unraisablehook = self._report_unraisable
        atexit.register(self._ignore)  # registered first, so it is called last
        return self

    def __exit__(self, *exc: object) -> None:
        sys.unraisablehook = self._unraisable
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        if self._previous:
            atexit.unregister(self._ignore)

    @property
    def ending(self) -> tuple[int, str]:
        """The exit code and the `exit_reason` of a run that is stopped."""
        return ENDINGS[self.requested or signal.SIGINT]

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Turn a signal into a KeyboardInterrupt, raised until it leaves this context.

        Any other exception that comes out after a signal is considered its consequence.
        """
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._interruptible = True
        _thread.start_new_thread(self._insist, (reading,))
        try:
            yield
            self.check()
        except KeyboardInterrupt:
            _write(1, f"{_STOPPING}\n")
            raise
        except Exception:
            if self.requested is None:
                raise
            _write(1, f"{_STOPPING}\n")
            raise Stopped from None
        finally:
            self._interruptible = False
            signal.set_wakeup_fd(before)
            os.close(writing)  # which ends the thread

    @contextmanager
    def heeded(
        self, say: Callable[[str], None], doing: str = "", until: str = "checked"
    ) -> Iterator[None]:
        """Set `requested` at the first signal and `say` so; a Ctrl-C after it leaves at once.

        Contexts may be nested.

        Args:
            say: called with a line of text, in a signal handler, which must not use `logging`.
            doing: what is done now, and what another Ctrl-C would do.
            until: "checked": work continues until it calls `check`. "done": `check` does nothing.
                "now": the first signal leaves at once, too. "asked": nothing leaves; work asks for
                `requested` and `repeats` itself.
        """
        before = self._heeded, self._interruptible
        self._heeded, self._interruptible = _Heeded(say, doing, until), False
        try:
            yield
        finally:
            self._heeded, self._interruptible = before

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come; for waits inside `heeded`."""
        if self.requested and not (self._heeded and self._heeded.until == "done"):
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Sleep like `time.sleep`; raise like `check`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, _AGAIN))

    def over(self, code: int) -> None:
        """Have a signal end the process at once with `code` from now on: all is done."""
        for signum in self._handled:
            signal.signal(signum, lambda signum, frame: exit_at_once(code))
        self._previous = {}

    def _ignore(self) -> None:
        """Ignore signals while Python itself ends.

        Python restores the default handlers then, so that the signal, and not `over`, would decide
        the exit code.
        """
        for signum in self._handled:
            signal.signal(signum, signal.SIG_IGN)

    def leave(self) -> NoReturn:
        """End the process with the exit code of a stopped one, at any moment.

        The processes that it has started end by themselves.
        """
        for output in self._on_terminal:
            _write(output, _SHOW_CURSOR)  # a spinner hides it
        _write(*self.last_words())
        exit_at_once(self.ending[0])

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if signum == signal.SIGHUP:
            self._print_to_nobody()
        again = self.requested is not None
        self.requested = self.requested or signal.Signals(signum)
        if self._heeded:
            if not again:
                self._heeded.tell()
            repeated = again and signum == signal.SIGINT
            self.repeats += repeated
            if self._heeded.until == "now" or (repeated and self._heeded.until != "asked"):
                raise Stopped
        elif not self._interruptible:
            self.leave()
        elif self._raised() is None:  # none is on its way out already
            stopped = Stopped()
            self._raised = weakref.ref(stopped)
            try:
                raise stopped
            finally:  # else this frame and the exception would keep each other alive
                del stopped

    def _insist(self, reading: int) -> None:
        """Raise again what was swallowed, and end the process if it does not stop.

        It runs in a thread of its own, since code below Python delays signals.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, self._handled)  # they are for the main thread
        came = None
        while True:
            numbers = os.read(reading, 64)
            if not numbers:
                break
            ours = [number for number in numbers if number in self._handled]
            if not ours or came is not None:
                continue
            came = time.monotonic()
            while self._interruptible and time.monotonic() - came < _PATIENCE:
                time.sleep(_AGAIN)
                if self._interruptible and self._raised() is None:
                    signal.pthread_kill(self._main, ours[0])
            if self._interruptible:
                self.requested = self.requested or signal.Signals(ours[0])
                self.leave()
        os.close(reading)

    def _report_unraisable(self, unraisable: object) -> None:
        if self.requested is None or getattr(unraisable, "exc_type", None) is not Stopped:
            self._unraisable(unraisable)  # type: ignore[arg-type]

    def _print_to_nobody(self) -> None:
        # Printing to a closed terminal fails, which would end the run before it saves.
        for output in self._on_terminal:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, output)
            os.close(null)


class _Heeded(NamedTuple):
    """The arguments of `Stop.heeded`."""

    say: Callable[[str], None]
    doing: str
    until: str

    def tell(self) -> None:
        """Say that the signal was heard."""
        with suppress(OSError, RuntimeError):  # it may come in the middle of other output
            self.say(f"{_STOPPING}{self.doing and ': '}{self.doing}")


def _write(output: int, text: str) -> None:
    with suppress(OSError):  # print is not safe in a signal handler
        os.write(output, text.encode())
