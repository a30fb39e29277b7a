"""What goes wrong with processes. Loads no library; whoever may import the package may too."""

from __future__ import annotations

import os
import re
from pathlib import Path

from launcher.files import DamagedError, open_regular

# How JAX's coordination and transfer servers, XLA, Gloo and NCCL tell of a peer that is gone.
_LOST_CONNECTION = re.compile(
    r"(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED)\b"
    r"|[A-Z_]+: .*(Connection (closed|reset|refused)|Socket closed|remote process exited)",
    re.DOTALL,
)


class ClusterError(Exception):
    """The processes could not be brought up, or Ray itself failed: what happened, what to do."""


class RayEndedError(ClusterError):
    """A process of Ray's own ended, and Ray with it; started again, it may well work."""


class HungError(ClusterError):
    """Workers did not answer for too long.

    Attributes:
        workers: where they are, in words, by their host.
    """

    def __init__(self, message: str, workers: dict[int, str]) -> None:
        super().__init__(message)
        self.workers = workers


class WorkerError(Exception):
    """A worker process died, or an exception was raised inside it.

    Attributes:
        worker: the worker's name, such as `worker_0`. host: its index in the pool.
        whereabouts: its name and, as far as they are known, its process and machine.
        died: whether the process is gone; otherwise it lives and takes further calls.
        silent: whether nobody can say more than that it is out of reach; also `died`.
        error_type: the name of the exception's class inside the worker; "" where it died.
        error_message: the exception's own text, or how the worker died.
        traceback_text: the worker's traceback, as text; "" where there is none.
        log: the file that holds the worker's output.
        log_tail: the last lines of that file.
    """

    def __init__(  # noqa: PLR0913 (a failure, by its facts)
        self,
        worker: str,
        error_message: str,
        log: Path,
        *,
        host: int = 0,
        whereabouts: str = "",
        died: bool = False,
        silent: bool = False,
        error_type: str = "",
        traceback_text: str = "",
    ) -> None:
        super().__init__(worker, error_message)
        self.worker = worker
        self.host = host
        self.whereabouts = whereabouts or worker
        self.died = died
        self.silent = silent
        self.error_type = error_type
        self.error_message = error_message
        self.traceback_text = traceback_text
        self.log = log
        self.log_tail = last_lines(log)

    @property
    def lost_connection(self) -> bool:
        """Whether it may only be a consequence of another process's end."""
        return not self.died and _LOST_CONNECTION.match(self.error_message) is not None

    @property
    def summary(self) -> str:
        """What happened, in one line."""
        told = self.error_message.strip().splitlines() or [""]
        kind = f" {self.error_type}:" if self.error_type else ""
        verb = "is out of reach" if self.silent else "died" if self.died else "failed"
        return f"{self.worker} {verb}:{kind} {told[0]}"

    def __str__(self) -> str:
        parts = [self.summary]
        if self.traceback_text:
            parts.append(self.traceback_text.rstrip())
        if self.log_tail:
            lines = "\n".join(f"  {line}" for line in self.log_tail.splitlines())
            parts.append(f"The last lines of {self.log}:\n{lines}")
        return "\n".join(parts)


def last_lines(path: Path, count: int = 20, most_bytes: int = 8192) -> str:
    """The last `count` lines of a text file, at most `most_bytes` of it; "" where it is missing."""
    try:
        with open(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - most_bytes))
            text = file.read().decode(errors="replace")
    except (OSError, DamagedError):
        return ""
    return "\n".join(text.splitlines()[-count:])
