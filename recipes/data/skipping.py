"""Samples that turn out bad only as they are read, where such are to be skipped.

The next good sample stands in for a bad one. Which one that is follows from the sample's number and
from what is on disk alone, so it is the same in all processes and after any resume, and a batch
keeps its size.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from launcher.recipes.protocols import InputError

MOST = 1000  # neighbours that are tried: more are no bad samples, but a disk that is not there

Sample = TypeVar("Sample")

_log = logging.getLogger(__name__)


class BadSampleError(ValueError):
    """An error raised when a sample cannot be used; its message says which and why."""


class Skipping:
    """Reads samples, and counts the bad ones in the log: at the first, second, fourth and so on.

    Args:
        count: how many samples there are, by number.
        kind: what they are, in a word: pictures, examples.
    """

    def __init__(self, count: int, kind: str) -> None:
        self._count, self._kind = count, kind
        self._bad: set[int] = set()
        self._noting = threading.Lock()

    def __call__(self, read: Callable[[int], Sample], number: int) -> Sample:
        """Return what `read` returns for a sample, or for the next one that is good.

        Args:
            read: takes a number; raises BadSampleError.
            number: the sample's.

        Raises:
            InputError: there are too many bad ones behind one another.
        """
        tries, problem = min(self._count, MOST), ""
        for tried in ((number + further) % self._count for further in range(tries)):
            try:
                return read(tried)
            except BadSampleError as error:
                problem = problem or str(error)
                self._note(tried, str(error))
        raise InputError(
            f"{problem}; dataset.bad=skip tried {tries:,} {self._kind} from there on and found no "
            "good one: check the data and its settings"
        )

    def _note(self, number: int, problem: str) -> None:
        with self._noting:
            if number in self._bad:
                return
            self._bad.add(number)
            found = len(self._bad)
        if found & (found - 1) == 0:
            _log.warning(
                f"{problem}; another stands in for it (dataset.bad=skip; bad {self._kind} so far "
                f"in this process: {found:,})"
            )
