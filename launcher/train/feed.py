"""Batches made ready ahead of the step that takes them. `worker` holds one feeder."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class Feeder(Generic[Batch]):
    """Calls `batch_at(k)` in a background thread, a little ahead of who asks for batch k.

    Batches are addressed by number, so there is no position to store, seek or lose: whoever asks
    for batch k gets batch k. A thread is enough, since NumPy and file reads let go of the lock
    that Python code shares.

    Args:
        batch_at: batch k from k, for 0 <= k < `stop`.
        start: the number that will be asked for first; its preparation begins now.
        stop: nothing is prepared from this number on.
        look_ahead: how many batches, beyond the one asked for, are made ready at most.
    """

    def __init__(
        self, batch_at: Callable[[int], Batch], start: int, stop: int, look_ahead: int = 2
    ) -> None:
        self._batch_at = batch_at
        self._stop = stop
        self._look_ahead = look_ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feeder")
        self._ready: dict[int, Future[Batch]] = {}
        self._prepare(start)

    def get(self, k: int) -> tuple[Batch, float]:
        """Batch k and the seconds waited for it. What `batch_at(k)` raised is raised here."""
        asked = time.perf_counter()
        self._prepare(k)
        batch = self._ready.pop(k).result()
        return batch, time.perf_counter() - asked

    def close(self) -> None:
        """Stop the thread, after the batch that it is making."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _prepare(self, k: int) -> None:
        for ahead in range(k, min(k + self._look_ahead + 1, self._stop)):
            if ahead not in self._ready:
                self._ready[ahead] = self._thread.submit(self._batch_at, ahead)
