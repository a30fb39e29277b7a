"""What can be wrong with a plan, or with how a step is to be cut. Shown by the front doors."""

from __future__ import annotations


class PlanError(ValueError):
    """No plan exists for what was asked; the message says why and what to change."""
