"""What a worker measures of its own process: when its metrics are there, and its memory."""

from __future__ import annotations

import resource
import sys
import time

import jax
import psutil


def fetched_metrics(metrics: dict[str, jax.Array]) -> tuple[dict[str, float], float]:
    """Wait for this process's metrics; return them, and `time.perf_counter()` at that time."""
    here = {name: x.addressable_data(0) for name, x in metrics.items() if x.addressable_shards}
    values = jax.device_get(here)
    completed = time.perf_counter()
    return {name: float(value) for name, value in values.items()}, completed


def memory_bytes() -> dict[str, float]:
    """Return the memory in use, and its peak, of any one device; on CPUs, of the process."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(stats):
        now = max(s["bytes_in_use"] for s in stats)
        peak = max(s["peak_bytes_in_use"] for s in stats)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        now = psutil.Process().memory_info().rss
    return {"perf/memory_bytes": now, "perf/peak_memory_bytes": max(now, peak)}
