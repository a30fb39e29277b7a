"""What can be wrong with a parallel method on a given cluster. Shown by the front doors."""

from __future__ import annotations


class PlanError(ValueError):
    """No plan exists for what was asked; the message says why and what to change."""


class UnmeasuredError(PlanError):
    """A plan needs the seconds of layers that could not be measured."""


class ScheduleError(ValueError):
    """A schedule cannot be followed: a defect of ours, not bad input."""
