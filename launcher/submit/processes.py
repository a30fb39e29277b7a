"""Runs launcher processes side by side and passes signals on to them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from launcher.base.follow import follow

_POLL_SECONDS = 0.05

# For each signal to the sweep: the signal that its runs get, and the sweep's exit code.
STOPS = {
    signal.SIGINT: (signal.SIGINT, 130),
    signal.SIGTERM: (signal.SIGTERM, 75),
    signal.SIGHUP: (signal.SIGTERM, 75),  # the terminal is gone
    signal.SIGUSR1: (signal.SIGTERM, 75),
    signal.SIGUSR2: (signal.SIGTERM, 75),
}


@dataclass(frozen=True)
class PointProcess:
    """A process to run: its command, and the file for its output, or None for the terminal."""

    command: Sequence[str]
    output: Path | None = None


class SignalRelay:
    """Runs processes and passes the signals of `STOPS` on to them.

    A process has a process group of its own, so that Ctrl-C in a terminal reaches it once, from
    here, and not twice.

    Attributes:
        received: the first signal that came, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SignalRelay:
        heeded = [s for s in STOPS if signal.getsignal(s) is not signal.SIG_IGN]  # as by nohup
        self._previous = {signum: signal.signal(signum, self._handle) for signum in heeded}
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def run(
        self,
        jobs: Sequence[PointProcess],
        slots: Sequence[Mapping[str, str]],
        began: Callable[[int], None],
        ended: Callable[[int, int], None],
    ) -> None:
        """Run jobs to their ends, as many at a time as there are slots.

        After a signal no further job begins.

        Args:
            jobs: the jobs, which begin in this order.
            slots: the variables that a job gets beside the environment, for each place.
            began: called with a job's number when it begins.
            ended: called with a job's number and exit code when it ends.
        """
        free, place, waiting = list(range(len(slots))), {}, list(range(len(jobs)))
        while waiting or self._running:
            while waiting and free and self.received is None:
                number, slot = waiting.pop(0), free.pop(0)
                began(number)
                place[number] = slot
                self._start(number, jobs[number], slots[slot])
            if not self._running:
                break
            time.sleep(_POLL_SECONDS)
            for number, child in list(self._running.items()):
                code = child.poll()
                if code is not None:
                    del self._running[number]
                    free.append(place[number])
                    ended(number, code)

    def _start(self, number: int, job: PointProcess, variables: Mapping[str, str]) -> None:
        with open(job.output, "ab") if job.output else nullcontext() as output:
            self._running[number] = subprocess.Popen(
                job.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                env=os.environ | variables,
                process_group=0,
                preexec_fn=follow,
            )
        if self.received is not None:  # it came while the process was being made
            self._running[number].send_signal(STOPS[self.received][0])

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        received = signal.Signals(signum)
        self.received = self.received or received
        for child in list(self._running.values()):
            child.send_signal(STOPS[received][0])
