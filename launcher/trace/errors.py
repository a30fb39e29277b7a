"""Errors in a user's train step. Raised by `trace`, shown by the entry points."""

from __future__ import annotations


class TraceError(ValueError):
    """The train step cannot be planned; the message says where and what to do."""


class GradientError(TraceError):
    """The step does not take its gradients through `launcher.grad`, or not in one place."""


class BatchError(TraceError):
    """The batch cannot be cut into microbatches."""


class JoinedError(BatchError):
    """The loss joins examples, of which a slice of the batch sees only its own.

    `cause` says where, in words that follow "since".
    """

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class ReduceError(BatchError):
    """What the user says of a result of the loss is not so."""


class BoundaryError(TraceError):
    """A pipeline boundary stands where the program cannot be cut."""


class LayerCountError(TraceError):
    """The forward pass has no so many layers."""
