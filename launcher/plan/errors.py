"""Errors of a parallel method on a given cluster.

The front doors show them to the user.
"""

from __future__ import annotations

from launcher.partition.assignment import Assignment
from launcher.partition.errors import PlanError


class TooLargeError(PlanError):
    """Nothing that a search finds fits the devices' memory.

    Attributes:
        assignment: the candidate that exceeds the memory least.
    """

    def __init__(self, message: str, assignment: Assignment) -> None:
        super().__init__(message)
        self.assignment = assignment


class UnmeasuredError(PlanError):
    """A plan needs the seconds of layers that could not be measured."""
