"""What can be wrong with a parallel method on a given cluster. Shown by the front doors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.plan.outline import Outline


class PlanError(ValueError):
    """No plan exists for what was asked; the message says why and what to change."""


class TooLargeError(PlanError):
    """Nothing that a search finds fits the devices' memory. `outline` is what lacks least."""

    def __init__(self, message: str, outline: Outline) -> None:
        super().__init__(message)
        self.outline = outline


class UnmeasuredError(PlanError):
    """A plan needs the seconds of layers that could not be measured."""
