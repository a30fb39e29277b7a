"""Performance figures, computed from measured steps. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any


def performance(
    step_seconds: float,
    *,
    samples: int,
    tokens: int | None = None,
    flops: float | None = None,
    devices: int = 1,
    peak_flops: float | None = None,
) -> dict[str, float | None]:
    """Return the `perf/...` metrics of one step.

    Args:
        step_seconds: the duration of the step.
        samples: samples in the global batch.
        tokens: tokens in the global batch, None where samples have none.
        flops: model FLOPs of one step, over all devices; recomputation does not count.
        devices: number of devices that took part.
        peak_flops: peak FLOP/s of one device, None where it is unknown.

    Returns:
        `perf/step_seconds`, `perf/samples_per_second`, `perf/tokens_per_second` and `perf/mfu`
            (model FLOPs utilization, a fraction of one); None is unknown.
    """
    mfu = flops / (step_seconds * devices * peak_flops) if flops and peak_flops else None
    return {
        "perf/step_seconds": step_seconds,
        "perf/samples_per_second": samples / step_seconds,
        "perf/tokens_per_second": None if tokens is None else tokens / step_seconds,
        "perf/mfu": mfu,
    }


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are known and finite; None where there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(known) if known else None


def measured(
    records: Sequence[Mapping[str, Any]],
    rates: Callable[[float], Mapping[str, float | None]],
    earlier: int = 0,
    warm_up: Collection[int] = (),
) -> dict[str, Any]:
    """Return the fields of `Summary` that follow from a run's logged steps.

    Losses are the first and the last logged ones, None where they were not finite. The step's time
    is a median, so that one slow step does not distort it, and the rates are those of that time.

    Args:
        records: the logged steps, as `read_metrics` returns them.
        rates: returns the `performance` of a step that takes so many seconds.
        earlier: number of steps taken before, perhaps by another plan on other devices. Times,
            rates and memory are those of the later steps, if any was logged.
        warm_up: the steps whose times count only where no other was logged, the newest of them.
    """
    newer = [record for record in records if record["step"] > earlier] or records
    steady = [record for record in newer if record["step"] not in warm_up] or newer[-1:]
    seconds = median(record.get("perf/step_seconds") for record in steady)
    at_rate = rates(seconds) if seconds else {}

    def column(key: str) -> list[Any]:
        of = newer if key.startswith(("perf/", "pipeline/")) else records
        return [record[key] for record in of if record.get(key) is not None]

    return {
        "steps": records[-1]["step"] if records else 0,
        "first_loss": records[0].get("train/loss") if records else None,
        "final_loss": records[-1].get("train/loss") if records else None,
        "eval_loss": (column("eval/loss") or [None])[-1],
        "step_seconds_median": seconds,
        "samples_per_second": at_rate.get("perf/samples_per_second"),
        "tokens_per_second": at_rate.get("perf/tokens_per_second"),
        "mfu": at_rate.get("perf/mfu"),
        "bubble_fraction": median(column("pipeline/bubble_fraction")),
        "skipped_steps": int(sum(column("train/skipped"))),
        "peak_memory_bytes": max(column("perf/peak_memory_bytes"), default=None),
        "memory_bytes": (column("perf/memory_bytes") or [None])[-1],
    }
