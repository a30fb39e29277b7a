"""Prefetches batches in a background thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class Feeder(Generic[Batch]):
    """Calls `batch_at(k)` in a background thread, a little ahead of the requests.

    Batches are addressed by index, so there is no position to store, seek or lose. A thread is
    enough, since NumPy and file reads release the interpreter's lock.

    Args:
        batch_at: returns batch k, for 0 <= k < `stop`.
        start: the index of the first request; its preparation begins at once.
        stop: the index from which no batch is prepared.
        look_ahead: the most batches prepared beyond the one requested.
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
        """Return batch k and the seconds spent waiting for it; raise what `batch_at(k)` raised."""
        began = time.perf_counter()
        self._prepare(k)
        batch = self._ready.pop(k).result()
        return batch, time.perf_counter() - began

    def peek(self, k: int) -> Batch:
        """Return batch k, which `get` is still to be asked for; raise what `batch_at(k)` raised."""
        self._prepare(k)
        return self._ready[k].result()

    def close(self) -> None:
        """Stop the thread once it has finished its batch."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _prepare(self, k: int) -> None:
        for ahead in range(k, min(k + self._look_ahead + 1, self._stop)):
            if ahead not in self._ready:
                self._ready[ahead] = self._thread.submit(self._batch_at, ahead)
