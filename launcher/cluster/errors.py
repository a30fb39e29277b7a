"""Errors of processes: of Ray, of Slurm and of the workers.

This module imports no library, so that importing it costs nothing.
"""

from __future__ import annotations

import os
import re
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from launcher.base import DamagedError, open_regular

# The messages of JAX's coordination and transfer servers, XLA, Gloo and NCCL about a lost peer.
_LOST_CONNECTION = re.compile(
    r"(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED)\b"
    r"|[A-Z_]+: .*(Connection (closed|reset|refused)|Socket closed|remote process exited)",
    re.DOTALL,
)


class ClusterError(Exception):
    """An error raised when the processes cannot be started, or when Ray itself fails."""


class RayEndedError(ClusterError):
    """An error raised when one of Ray's own processes ended, and Ray with it.

    A further start may well succeed.
    """


class HungError(ClusterError):
    """An error raised when workers have not answered for too long.

    Attributes:
        workers: a description of each worker with its process and machine, by host.
    """

    def __init__(self, message: str, workers: dict[int, str]) -> None:
        super().__init__(message)
        self.workers = workers


_TAIL_LINES, _TAIL_BYTES = 20, 8192  # of a log, at most
_OF_INPUT = "InputError"  # for an unusable file: the message is enough, a traceback adds nothing


@dataclass(eq=False, repr=False)
class WorkerError(Exception):
    """An error raised when a worker process died, or for an exception raised inside it.

    Attributes:
        worker: the worker's name, such as `worker_0`.
        host: the worker's index in the pool.
        whereabouts: the worker's name with its process and machine, if known.
        died: whether the process is gone; otherwise it lives and takes further calls.
        is_server: whether it is a parameter server, and no worker.
        silent: whether all that is known is that it cannot be reached; `died` is true as well.
        error_type: the name of the exception's class inside the worker; "" if the worker died.
        error_message: the text of the exception, or how the worker died.
        traceback_text: the worker's traceback, as text; "" if there is none.
        log: the file with the worker's output.
        log_tail: the last lines of that file.
    """

    worker: str
    error_message: str
    log: Path
    _: KW_ONLY
    host: int = 0
    whereabouts: str = ""
    died: bool = False
    silent: bool = False
    is_server: bool = False
    error_type: str = ""
    traceback_text: str = ""
    log_tail: str = field(init=False)

    def __post_init__(self) -> None:
        super().__init__(self.worker, self.error_message)
        self.whereabouts = self.whereabouts or self.worker
        self.log_tail = last_lines(self.log)

    @property
    def lost_connection(self) -> bool:
        """Whether the error may only be a consequence of another process's end."""
        return not self.died and _LOST_CONNECTION.match(self.error_message) is not None

    @property
    def summary(self) -> str:
        """The error in one line."""
        lines = self.error_message.strip().splitlines() or [""]
        kind = f" {self.error_type}:" if self.error_type else ""
        verb = "is out of reach" if self.silent else "died" if self.died else "failed"
        return f"{self.worker} {verb}:{kind} {lines[0]}"

    def __str__(self) -> str:
        parts = [self.summary]
        if self.error_type == _OF_INPUT:
            return parts[0]
        if self.traceback_text:
            parts.append(self.traceback_text.rstrip())
        if self.log_tail:
            lines = "\n".join(f"  {line}" for line in self.log_tail.splitlines())
            parts.append(f"The last lines of {self.log}:\n{lines}")
        return "\n".join(parts)


def last_lines(path: Path) -> str:
    """Return the last lines of a text file, or "" if it is missing."""
    try:
        with open(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except (OSError, DamagedError):
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
