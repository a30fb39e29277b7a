"""A recorded call of a parallelized step: `step.timeline(state, batch)`."""

from __future__ import annotations

from typing import Any

from launcher.api.ray_backend import RemoteExecutable
from launcher.base.spans import Clock
from launcher.report.pages.timeline import ProcessSpans, Timeline
from launcher.runtime import Executable


def recorded(
    executable: Executable | RemoteExecutable, args: tuple[Any, ...]
) -> tuple[Any, Timeline]:
    """Run one step and record it; return its results and its timeline, whose step is number 1."""
    if isinstance(executable, RemoteExecutable):
        results, found, clocks = executable.record(*args)
        pairs = enumerate(zip(found, clocks, strict=True))
        parts = [ProcessSpans(f"worker {i}", *pair) for i, pair in pairs]
    else:
        results, read = executable.record(*args)
        parts = [ProcessSpans("this process", read(), Clock())]
    return results, Timeline().with_step(1, parts)
