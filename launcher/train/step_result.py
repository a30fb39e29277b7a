"""The result of a step in a worker: sent to the devices, awaited, and measured."""

from __future__ import annotations

import gc
import logging
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import numpy as np

from launcher.base import Span
from launcher.runtime import Copies, StageTimes
from launcher.schedule import Task

_log = logging.getLogger(__name__)


def fetched_values(metrics: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Wait for the metrics of this process and return them."""
    here = {name: x.addressable_data(0) for name, x in metrics.items() if x.addressable_shards}
    values: dict[str, np.ndarray] = jax.device_get(here)
    return values


def fetched_metrics(metrics: dict[str, jax.Array]) -> tuple[dict[str, float], float]:
    """Wait for this process's metrics; return them, and `time.perf_counter()` at that time."""
    values = fetched_values(metrics)
    completed = time.perf_counter()
    return {name: float(value) for name, value in values.items()}, completed


def memory_bytes(counted: int | None) -> dict[str, float]:
    """Return the memory of this process, and of the fullest of its devices, by their metrics.

    Args:
        counted: the peak of a device that is this CPU, by the step's programs. Such devices have
            no memory of their own that could be asked.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    found: dict[str, float] = {"perf/process_peak_bytes": process}
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(stats):
        found["perf/memory_bytes"] = max(s["bytes_in_use"] for s in stats)
        found["perf/peak_memory_bytes"] = max(s["peak_bytes_in_use"] for s in stats)
    elif counted is not None:
        found["perf/peak_memory_bytes"] = counted
    return found


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    Attributes:
        step: the number of the step, from 1.
        metrics: values by the keys of `launcher.report.trackers.tracker`; only those that this
            process knows, as the loss is made on one stage.
        completed_at: when the step was complete, in seconds since the epoch.
        task_seconds: the time of each task here, if the step was profiled.
        copies: digests of the replicas of the state after it, where they are checked: a process's.
        recordings: what was recorded and has not been handed on yet.
        spent: of each process, the seconds for which its devices waited for the batch ("data"), and
            those of garbage collection ("garbage").
        snapshots: of each process, the step of the newest complete snapshot (`Snapshots.newest`).
    """

    step: int
    metrics: dict[str, float]
    completed_at: float
    task_seconds: dict[Task, float] = field(default_factory=dict)
    copies: tuple[Copies, ...] = ()
    recordings: tuple[Recording, ...] = ()
    spent: tuple[dict[str, float], ...] = ()
    snapshots: tuple[int, ...] = ()


class GarbageTime:
    """The seconds that Python's garbage collection takes in this process, until `close`."""

    def __init__(self) -> None:
        self._began = self._seconds = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self._seconds += now - self._began

    def take(self) -> float:
        """Return those since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """Stop counting."""
        gc.callbacks.remove(self._note)


def with_stage_times(result: StepResult, times: StageTimes) -> StepResult:
    """Return a result with what a profiled step took, stage by stage and task by task."""
    busy = enumerate(times.stage_seconds)
    stages = {f"pipeline/stage_{i}_seconds": seconds for i, seconds in busy}
    return replace(result, metrics=result.metrics | stages, task_seconds=times.task_seconds)


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


@dataclass(frozen=True)
class Recording:
    """What one process recorded of a step.

    Attributes:
        step: the step that was recorded.
        process: the rank of the worker; under parameter servers JAX knows of one process alone.
        spans: its spans, by its own clock.
    """

    step: int
    process: int
    spans: tuple[Span, ...]


class RecordingReader:
    """The recordings of a process that have not been handed on."""

    def __init__(self) -> None:
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._futures: list[Future[Recording]] = []
        self._unasked: list[Future[Recording]] = []

    def add(
        self, step: int, rank: int, read: Callable[[], list[Span]], hand_on: bool = True
    ) -> None:
        """Begin to read the recording of a step, by the function of `Executable.record`.

        Args:
            step: the step.
            rank: the worker's.
            read: returns the spans, and ends the profiler's session.
            hand_on: whether `take` is to return it.
        """
        future = self._reader.submit(_recording, step, rank, read)
        (self._futures if hand_on else self._unasked).append(future)

    def take(self) -> tuple[Recording, ...]:
        """Return those that have been read, each once."""
        done = [future for future in self._futures if future.done()]
        self._futures = [future for future in self._futures if future not in done]
        return tuple(future.result() for future in done)

    def wait(self) -> None:
        """Wait until all have been read."""
        wait([*self._futures, *self._unasked])
        self._unasked = []

    def close(self) -> None:
        """Stop the thread."""
        self._reader.shutdown()


def trace_folder(folder: str, rank: int, step: int) -> Path:
    """Return where a worker keeps the trace of a step, below the run's folder of traces."""
    return Path(folder) / f"worker_{rank}" / f"step_{step}"


def _recording(step: int, rank: int, read: Callable[[], list[Span]]) -> Recording:
    """Read what was recorded; training does not end over it."""
    try:
        spans = read()
    except Exception as error:  # JAX's profiler, and what its file holds
        _log.warning(f"what was recorded of step {step} cannot be read: {error!r}")
        spans = []
    return Recording(step, rank, tuple(spans))
