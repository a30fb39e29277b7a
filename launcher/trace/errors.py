"""Errors in a user's train step, raised by `trace` and reported by the entry points."""

from __future__ import annotations


class TraceError(ValueError):
    """The train step cannot be planned; the message says where and what to do."""


class GradientError(TraceError):
    """The step does not take its gradients through `launcher.grad`, or not in one place."""


class LossError(TraceError, TypeError):
    """The loss, or what it is differentiated by, is no floating-point number."""


class BatchError(TraceError):
    """The batch cannot be split into microbatches."""


class JoinedError(BatchError):
    """The loss combines examples of several slices of the batch.

    `cause` says where, in words that follow "since".
    """

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class ReduceError(BatchError):
    """The `reduce` of a result contradicts the program of the loss."""


class BoundaryError(TraceError):
    """A pipeline boundary stands where the program cannot be cut."""


class LayerCountError(TraceError):
    """The forward pass has fewer layers than asked for."""
