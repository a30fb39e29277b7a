"""Errors of plans, and of cutting a step. The command line shows them in one line."""

from __future__ import annotations


class PlanError(ValueError):
    """No plan exists for what was asked; the message says why and what to change."""
