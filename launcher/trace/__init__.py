"""The train step as data."""

from launcher.trace.errors import BatchError, BoundaryError, GradientError, JoinedError, TraceError
from launcher.trace.slicing.slices import Loss
from launcher.trace.step import TracedStep, trace_step

__all__ = [
    "BatchError",
    "BoundaryError",
    "GradientError",
    "JoinedError",
    "Loss",
    "TraceError",
    "TracedStep",
    "trace_step",
]
