"""Errors of a parallel method on a given cluster.

The front doors show them to the user.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from launcher.partition import Assignment, PlanError


class TooLargeError(PlanError):
    """Nothing that a search finds fits the devices' memory.

    Attributes:
        assignment: the candidate that exceeds the memory least.
    """

    def __init__(
        self, message: str, assignment: Assignment, advice: Callable[[], str] = str
    ) -> None:
        """Store the message, which ends with the advice: found by searches, so only when shown."""
        super().__init__(message)
        self.assignment = assignment
        self._advice = functools.cache(advice)

    def __str__(self) -> str:
        return super().__str__() + self._advice()

    def reword(self, rewrite: Callable[[str], str]) -> None:
        """Tell the same in other words, which `rewrite` makes of these."""
        advice = self._advice
        self.args = (rewrite(super().__str__()),)
        self._advice = functools.cache(lambda: rewrite(advice()))


class UnmeasuredError(PlanError):
    """A plan needs the seconds of layers that could not be measured."""
