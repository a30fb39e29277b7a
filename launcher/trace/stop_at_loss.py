"""Tracing a step no further than its loss.

For a slice of the batch only the loss is asked for, and of a large model the parameter update takes
as long to trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

_stops = ContextVar("stops_at_loss", default=False)
_reached: ContextVar[list[Any] | None] = ContextVar("losses_reached", default=None)


class LossReachedError(BaseException):
    """Ends the trace of a step at its loss.

    Attributes:
        avals: the operands of the loss.
        params: the parameters of its equation.
    """

    def __init__(self, avals: Sequence[Any], params: dict[str, Any]) -> None:
        super().__init__()
        self.avals, self.params = avals, params


@contextlib.contextmanager
def stopping_at_loss() -> Iterator[None]:
    """Have the traces inside end with `LossReachedError` when they come to a loss."""
    token = _stops.set(True)
    try:
        yield
    finally:
        _stops.reset(token)


@contextlib.contextmanager
def listing_losses() -> Iterator[list[Any]]:
    """Give a list, to which the traces inside add the program of each loss that they come to.

    That may be one that the step does not hold, as under `jax.eval_shape`, or inside another loss.
    """
    found: list[Any] = []
    token = _reached.set(found)
    try:
        yield found
    finally:
        _reached.reset(token)


def end_here(avals: Sequence[Any], params: dict[str, Any]) -> None:
    """Raise LossReachedError if the trace is to end at this loss."""
    if _stops.get():
        raise LossReachedError(avals, params)
    if (found := _reached.get()) is not None:
        found.append(params["jaxpr"])
