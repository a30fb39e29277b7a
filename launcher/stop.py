"""When somebody wants the process to end: Ctrl-C (SIGINT), the scheduler (SIGTERM, or SIGUSR1 and
SIGUSR2 ahead of time), a terminal that is closed (SIGHUP).

`__main__` makes the one `Stop` of a process before it imports anything else; standard library
only. What a signal does depends on what the process is at:

- nothing has begun (settings are read, libraries imported): it ends there and then, without an
  exception, which imports would turn into something else;
- `interruptible` work, which only computes and may be left anywhere: KeyboardInterrupt, again and
  again where somebody swallows it (garbage collection, imports, callbacks from C++); code below
  Python that takes no notice within `_PATIENCE` seconds is left with the whole process;
- `heeded` work, which has to end in good order: it is said that the signal was heard, and `check`,
  which whoever waits there calls, ends the wait. A second Ctrl-C is a KeyboardInterrupt.
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
from types import FrameType
from typing import NamedTuple, NoReturn

# What each means: the exit code, and the `exit_reason` of the summary.
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
    """A signal has come; unlike its base it can be seen to be gone."""


class Stop:
    """Handles the signals of `ENDINGS` inside `with stop:`; the main thread only, one at a time.

    Attributes:
        requested: the first signal that came.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._interruptible = False
        self._heeded: _Heeded | None = None
        self._raised: Callable[[], object] = lambda: None
        self._main = _thread.get_ident()
        # Under nohup a closed terminal is to be ignored, and stays so.
        can_hang_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        self._handled = [s for s in ENDINGS if s is not signal.SIGHUP or can_hang_up]
        self._on_terminal = [output for output in (1, 2) if os.isatty(output)]

    def __enter__(self) -> Stop:
        self._previous = {signum: signal.signal(signum, self._handle) for signum in self._handled}
        self._unraisable = sys.unraisablehook
        sys.unraisablehook = self._report_unraisable
        atexit.register(self._ignore)  # before all others, and so the last to be called
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
        """Inside, a signal is a KeyboardInterrupt, on and on until it gets out of here. Whatever
        else comes out after a signal is taken for its consequence."""
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
        self, say: Callable[[str], None], told: str = "", until: str = "checked"
    ) -> Iterator[None]:
        """Inside, the first signal sets `requested`, and `say` is told so; a Ctrl-C after it leaves
        at once. May be nested.

        Args:
            told: what is done now, and what another Ctrl-C would do.
            until: "checked": work goes on until it calls `check`. "done": `check` does nothing.
                "now": the first signal leaves at once, too.
        """
        before = self._heeded, self._interruptible
        self._heeded, self._interruptible = _Heeded(say, told, until), False
        try:
            yield
        finally:
            self._heeded, self._interruptible = before

    def check(self) -> None:
        """Raise KeyboardInterrupt where a signal has come; for waits inside `heeded`."""
        if self.requested and not (self._heeded and self._heeded.until == "done"):
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """`time.sleep`; raises like `check`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, _AGAIN))

    def over(self, code: int) -> None:
        """From now on a signal ends the process at once with `code`: all is done."""
        for signum in self._handled:
            signal.signal(signum, lambda signum, frame: os._exit(code))
        self._previous = {}

    def _ignore(self) -> None:
        """Ignore signals while Python itself ends: it puts the handlers back that would have the
        signal, and not `over`, say how the process ended."""
        for signum in self._handled:
            signal.signal(signum, signal.SIG_IGN)

    def leave(self) -> NoReturn:
        """End the process with the exit code of a stopped one, whatever is going on in it. What it
        has started follows by itself."""
        for output in self._on_terminal:
            _write(output, _SHOW_CURSOR)  # which a spinner hides
        _write(1, f"{_STOPPING}\n")
        os._exit(self.ending[0])

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if signum == signal.SIGHUP:
            self._print_to_nobody()
        again = self.requested is not None
        self.requested = self.requested or signal.Signals(signum)
        if self._heeded:
            if not again:
                self._heeded.tell()
            if self._heeded.until == "now" or (again and signum == signal.SIGINT):
                raise Stopped
        elif not self._interruptible:
            self.leave()
        elif self._raised() is None:  # it is not on its way out already
            stopped = Stopped()
            self._raised = weakref.ref(stopped)
            try:
                raise stopped
            finally:  # else this frame and the exception would keep one another alive
                del stopped

    def _insist(self, reading: int) -> None:
        """Raise again what was swallowed, and leave what does not end. A thread of its own: code
        below Python holds signals up."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._handled)  # they interrupt the main thread
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
        # What is printed to a terminal that is gone fails, and would end the run before it saves.
        for output in self._on_terminal:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, output)
            os.close(null)


class _Heeded(NamedTuple):
    """See `Stop.heeded`."""

    say: Callable[[str], None]
    told: str
    until: str

    def tell(self) -> None:
        with suppress(OSError, RuntimeError):  # in the middle of other output
            self.say(f"{_STOPPING}{self.told and ': '}{self.told}")


def _write(output: int, text: str) -> None:
    with suppress(OSError):  # print is not safe in a signal handler
        os.write(output, text.encode())
