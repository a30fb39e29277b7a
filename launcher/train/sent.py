"""A step that a worker has sent to its devices, and how long these waited for its batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import jax

from launcher.runtime import Copies
from launcher.train.measured_here import memory_bytes
from launcher.train.step_result import StepResult


@dataclass(frozen=True)
class Sent:
    """A step that the devices are working on.

    Attributes:
        step: its number.
        outcome: its metrics, and `time.perf_counter()` when it was complete.
        wait_seconds: the wait for its batch.
        stall_seconds: of these, those in which no step was under way.
        digests: of its replicas, if they are checked.
    """

    step: int
    outcome: Future[tuple[dict[str, float], float]]
    wait_seconds: float
    stall_seconds: float
    digests: list[jax.Array]


def finished(
    sent: Sent,
    before: float,
    copies: Callable[[list[jax.Array]], Copies] | None,
    counted: int | None,
) -> tuple[StepResult, float]:
    """Wait for a step; return its result, and `time.perf_counter()` when it was complete.

    Args:
        sent: the step.
        before: when the step before was complete.
        copies: finishes the digests of its replicas, if there are any.
        counted: `Executable.peak_bytes` of the step.
    """
    values, completed = sent.outcome.result()
    metrics = {f"train/{name}": value for name, value in values.items()}
    metrics |= {
        "perf/step_seconds": completed - before,
        **memory_bytes(counted),
        "data/wait_seconds": sent.wait_seconds,
        "data/stall_seconds": sent.stall_seconds,
    }
    completed_at = time.time() - (time.perf_counter() - completed)
    made = (copies(sent.digests),) if copies and sent.digests else ()
    return StepResult(sent.step, metrics, completed_at, copies=made), completed


def stalled_seconds(waited: float, before: Sent | None) -> float:
    """Return for how much of the wait for a batch, which has just ended, no step was under way.

    Args:
        waited: the seconds of the wait.
        before: the step that was sent before, if its result has not been fetched.
    """
    if before is None:
        return waited
    if not before.outcome.done():
        return 0.0
    return max(0.0, min(waited, time.perf_counter() - before.outcome.result()[1]))
