"""What a worker measures of its own process: when its metrics are there, and its memory."""

from __future__ import annotations

import resource
import sys
import time

import jax


def fetched_metrics(metrics: dict[str, jax.Array]) -> tuple[dict[str, float], float]:
    """Wait for this process's metrics; return them, and `time.perf_counter()` at that time."""
    here = {name: x.addressable_data(0) for name, x in metrics.items() if x.addressable_shards}
    values = jax.device_get(here)
    completed = time.perf_counter()
    return {name: float(value) for name, value in values.items()}, completed


def memory_bytes(counted: int | None) -> dict[str, float]:
    """Return the memory of this process, and of the fullest of its devices, by their metrics.

    Args:
        counted: what stands for the peak of a device that is this CPU: what the step's programs
            say. Such devices have no memory of their own that could be asked.
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
