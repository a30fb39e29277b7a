"""When somebody wants the run to end: Ctrl-C (SIGINT), the scheduler (SIGTERM, or SIGUSR1 and
SIGUSR2 ahead of time), a terminal that is closed (SIGHUP).

Before and after training each ends the launcher at once. While it trains, the first is only noted,
so that `loop` can finish the step and save. `run` makes the one `StopSignals` of a run.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# What each means: the exit code, and the `exit_reason` of the summary.
ENDINGS = {
    signal.SIGINT: (130, "interrupted"),
    signal.SIGTERM: (75, "preempted"),
    signal.SIGHUP: (75, "preempted"),
    signal.SIGUSR1: (75, "preempted"),
    signal.SIGUSR2: (75, "preempted"),
}


_NOTED = b"\nlauncher: finishing this step and saving; Ctrl-C once more leaves at once, unsaved\n"


class StopSignals:
    """Handles the signals of `ENDINGS` inside `with signals:`; the main thread only.

    Attributes:
        requested: the first signal that came. Whoever catches the KeyboardInterrupt that leaves at
            once finds here what it meant; the exception cannot say, because Ray, where it waits,
            puts a new one in its place.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._patient = False
        # Under nohup a closed terminal is to be ignored, and stays so.
        can_hang_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        self._handled = [s for s in ENDINGS if s is not signal.SIGHUP or can_hang_up]
        self._on_terminal = [output for output in (1, 2) if os.isatty(output)]

    def __enter__(self) -> StopSignals:
        self._previous = {signum: signal.signal(signum, self._handle) for signum in self._handled}
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    @property
    def ending(self) -> tuple[int, str]:
        """The exit code and the `exit_reason` of a run that is stopped."""
        return ENDINGS[self.requested or signal.SIGINT]

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, the first signal only sets `requested`; Ctrl-C after it leaves at once."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if signum == signal.SIGHUP:
            self._print_to_nobody()
        again = self.requested is not None
        self.requested = self.requested or signal.Signals(signum)
        if self._patient and not again:
            with contextlib.suppress(OSError):  # print is not safe in a signal handler
                os.write(1, _NOTED)
        if not self._patient or (again and signum == signal.SIGINT):
            raise KeyboardInterrupt

    def _print_to_nobody(self) -> None:
        # What is printed to a terminal that is gone fails, and would end the run before it saves.
        for output in self._on_terminal:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, output)
            os.close(null)
