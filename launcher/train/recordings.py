"""What was recorded of steps, read in a thread of its own while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import jax

from launcher.spans import Span

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recording:
    """What one process recorded of a step.

    Attributes:
        step: the step that was recorded.
        process: the index of the process.
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

    def add(self, step: int, read: Callable[[], list[Span]]) -> None:
        """Begin to read what was recorded of a step, by what `Executable.record` returned."""
        self._futures.append(self._reader.submit(_recording, step, read))

    def take(self) -> tuple[Recording, ...]:
        """Return those that have been read, each once."""
        done = [future for future in self._futures if future.done()]
        self._futures = [future for future in self._futures if future not in done]
        return tuple(future.result() for future in done)

    def wait(self) -> None:
        """Wait until all have been read."""
        wait(self._futures)

    def close(self) -> None:
        """Stop the thread."""
        self._reader.shutdown()


def _recording(step: int, read: Callable[[], list[Span]]) -> Recording:
    """Read what was recorded; training does not end over it."""
    try:
        spans = read()
    except Exception as error:  # JAX's profiler, and what its file holds
        _log.warning(f"what was recorded of step {step} cannot be read: {error!r}")
        spans = []
    return Recording(step, jax.process_index(), tuple(spans))
