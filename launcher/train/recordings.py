"""Read recordings of steps in a background thread during training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from launcher.base import Span

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recording:
    """What one process recorded of a step.

    Attributes:
        step: the step that was recorded.
        process: the rank of the worker; under parameter servers JAX knows of one process alone.
        spans: its spans, by its own clock.
    """

    step: int
    process: int
    spans: tuple[Span, ...]


class Recordings:
    """The recordings of a process that have not been handed on."""

    def __init__(self) -> None:
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._futures: list[Future[Recording]] = []
        self._unasked: list[Future[Recording]] = []

    def add(
        self, step: int, rank: int, read: Callable[[], list[Span]], hand_on: bool = True
    ) -> None:
        """Begin to read what was recorded of a step, by what `Executable.record` returned.

        Args:
            step: the step.
            rank: the worker's.
            read: returns the spans, and ends the profiler's session.
            hand_on: whether `take` is to return it.
        """
        future = self._reader.submit(_recording, step, rank, read)
        (self._futures if hand_on else self._unasked).append(future)

    def take(self) -> tuple[Recording, ...]:
        """Return those that have been read, each once."""
        done = [future for future in self._futures if future.done()]
        self._futures = [future for future in self._futures if future not in done]
        return tuple(future.result() for future in done)

    def wait(self) -> None:
        """Wait until all have been read."""
        wait([*self._futures, *self._unasked])
        self._unasked = []

    def close(self) -> None:
        """Stop the thread."""
        self._reader.shutdown()


def trace_folder(folder: str, rank: int, step: int) -> Path:
    """Return where a worker keeps the trace of a step, below the run's folder of traces."""
    return Path(folder) / f"worker_{rank}" / f"step_{step}"


def _recording(step: int, rank: int, read: Callable[[], list[Span]]) -> Recording:
    """Read what was recorded; training does not end over it."""
    try:
        spans = read()
    except Exception as error:  # JAX's profiler, and what its file holds
        _log.warning(f"what was recorded of step {step} cannot be read: {error!r}")
        spans = []
    return Recording(step, rank, tuple(spans))
