"""Data that comes only in its order, as numbered batches: a stream is resumed by count."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from launcher.recipes.protocols import Batch, InputError


class StreamedBatches:
    """The batches of a stream; called with k, it returns batch k.

    A run asks for them in order, so nothing is read twice, except from the beginning where it
    resumes: then `begin` is asked to pass over what was taken before. Batch k is a pure function of
    k if `begin` gives the same stream each time. Each process makes whole batches.

    Args:
        begin: takes a number, and returns an iterator over batches that skips as many, by reading
            and dropping them or by seeking.
    """

    def __init__(self, begin: Callable[[int], Iterator[Batch]]) -> None:
        self._begin, self._lock = begin, threading.Lock()
        self._next = -1  # the number of the batch that comes next; none is under way yet
        self._stream: Iterator[Batch] = iter(())
        self._last: tuple[int, Batch] | None = None

    def __call__(self, k: int) -> Batch:
        """Return batch k.

        Raises:
            InputError: the stream has ended.
        """
        with self._lock:
            if self._last is not None and self._last[0] == k:
                return self._last[1]
            if not 0 <= k - self._next <= 1 or self._next < 0:
                self._stream, self._next = self._begin(k), k
            while self._next <= k:
                try:
                    batch = next(self._stream)
                except StopIteration:
                    raise InputError(
                        f"the dataset's stream ends after {self._next:,} batches, and batch "
                        f"{k:,} is asked for; lower train.steps, or begin it again at its end"
                    ) from None
                self._last, self._next = (self._next, batch), self._next + 1
            return batch
