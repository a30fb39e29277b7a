"""What reporting costs a step: steps with all of it beside plain ones, in pairs, in random order.

    python tests/benchmarks/timeline_cost.py [--pairs 200] [--recorded 10] [SETTING …]

The default model in two stages of two devices, four microbatches, or what the settings say. A
reported step is logged by all that a run has: console, `metrics.jsonl`, Weights & Biases (offline),
`status.json` (at most once a second, as in a run) and the accounting's clock; its pair is the same
step without. In a run that is done by the driver, beside the next step; here it is waited for, with
what the trackers' threads do, so nothing of it is hidden, and none of it falls on a plain step.

It prints the median of the pairs' ratios with its 95 % confidence interval by the bootstrap; first
for processor time, which tells more on a busy machine. As the devices are idle while a step is
reported, its processor time is also given by itself, which is far more exact than the ratio.

A recorded step (`report.timeline_steps`; one a run by default) is compared in the same way, and
what reading it takes is given apart: in a run that is beside the next steps, once.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

DEVICES = 4
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import psutil  # noqa: E402
from turns import worker_of  # noqa: E402

from launcher.base.spans import Clock  # noqa: E402
from launcher.driver.folder.folder import RunFolder  # noqa: E402
from launcher.driver.folder.plan_files import write_plan  # noqa: E402
from launcher.driver.folder.status import Status  # noqa: E402
from launcher.driver.record.run_log import RunLog  # noqa: E402
from launcher.report.console import make_console  # noqa: E402
from launcher.report.pages.timeline import ProcessSpans  # noqa: E402
from launcher.report.trackers.queued import QueuedTracker  # noqa: E402
from launcher.train.step_result import (  # noqa: E402
    StepResult,
    fetched_metrics,
    memory_bytes,
)

SETTINGS = (
    *("train.steps=100000", "train.eval_every=0", "train.log_every=1", "wandb.mode=offline"),
    *("cluster=emulated", f"cluster.gpus={DEVICES}", "run.id=cost"),
    *("parallel=manual", "parallel.num_stages=2", "parallel.num_micro_batches=4"),
)
STATUS_SECONDS = 1.0  # from one writing of a run's status to the next
RESAMPLED = 10_000
WARM_UP = 3  # pairs


class Cost(NamedTuple):
    """Seconds of a step: of the clock, of the processor, and what of these reporting took."""

    wall: float
    used: float
    reporting: float = 0.0


class Trained:
    """A compiled step, its state, and a batch."""

    def __init__(self, settings: Sequence[str]) -> None:
        self.worker, self.config, self.plan = worker_of([*SETTINGS, *settings], DEVICES)
        self.run, self.state = self.worker._train, self.worker._state
        self.batch = self.worker._feeder.get(0)[0]
        self.made = 0

    def step(self, report: Callable[[StepResult], None] | None = None) -> Cost:
        """Make a step, and report it if there is something that reports."""
        began, used = time.perf_counter(), time.process_time()
        self.state, metrics = self.run(self.state, self.batch)
        jax.block_until_ready(self.state)
        values, _ = fetched_metrics(metrics)
        self.made += 1
        reporting = 0.0
        if report:
            before = time.process_time()
            found = {f"train/{name}": value for name, value in values.items()} | memory_bytes(None)
            found |= {"perf/step_seconds": time.perf_counter() - began, "data/stall_seconds": 0.0}
            report(StepResult(self.made, found, time.time()))
            reporting = time.process_time() - before
        return Cost(time.perf_counter() - began, time.process_time() - used, reporting)

    def record(self, profiled: bool) -> tuple[Cost, list[Any], float]:
        """Record a step; return its cost, its spans, and the processor seconds of reading it."""
        began, used = time.perf_counter(), time.process_time()
        (self.state, metrics), read = self.run.record(self.state, self.batch, profiled=profiled)
        fetched_metrics(metrics)
        cost = Cost(time.perf_counter() - began, time.process_time() - used)
        used = time.process_time()
        return cost, read(), time.process_time() - used


class Reporting:
    """All that a run reports by, in a folder of its own."""

    def __init__(self, folder: Path, trained: Trained) -> None:
        home = RunFolder(folder, status=Status(folder, trained.config.train.steps))
        write_plan(home, trained.config, trained.plan)
        console = make_console(io.StringIO())
        self.log = RunLog(home, trained.config, trained.plan, 0.0, console, None)
        self.log.open(0)
        self.log.show(0)
        self._status, self._written = home.status, 0.0

    def step(self, result: StepResult) -> None:
        """Report a step, and wait until all is done."""
        self.log.recorder.lap("training", result)
        self.log.recorder.record(result)
        if time.monotonic() - self._written > STATUS_SECONDS:
            self._written = time.monotonic()
            self._status._write()
        for tracker in self.log._registered:
            assert isinstance(tracker, QueuedTracker)
            done = threading.Event()
            tracker._put(done.set)
            done.wait()


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of ratios and its 95 % confidence interval, by the bootstrap."""
    logs = np.log(np.asarray(ratios))
    drawn = np.random.default_rng(0).choice(logs, (RESAMPLED, len(logs)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return tuple(math.expm1(x) for x in (float(np.median(logs)), float(low), float(high)))


def more(name: str, ratios: Sequence[float]) -> str:
    middle, low, high = interval(ratios)
    return f"{name} {middle:+.2%} (95 %: {low:+.2%} to {high:+.2%})"


def compare(pairs: Sequence[tuple[Cost, Cost]]) -> str:
    """Return by how much the first of each pair is more than the second."""
    used = more("processor time", [a.used / b.used for a, b in pairs])
    return f"{used}; {more('wall', [a.wall / b.wall for a, b in pairs])}"


def in_pairs(first: Callable[[], Any], second: Callable[[], Any], count: int) -> list[Any]:
    """Call two functions so often, in turns, each pair in random order; the first pairs warm up."""
    drawn, pairs = random.Random(0), []
    for number in range(count + WARM_UP):
        order = [0, 1] if drawn.random() < 0.5 else [1, 0]
        pair = {which: (first, second)[which]() for which in order}
        if number >= WARM_UP:
            pairs.append((pair[0], pair[1]))
    return pairs


def children_seconds() -> float:
    """Return the processor seconds of the processes that this one has started."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--recorded", type=int, default=10)
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    trained = Trained(args.settings)
    with tempfile.TemporaryDirectory() as folder:
        reporting = Reporting(Path(folder), trained)
        before = children_seconds()
        pairs = in_pairs(lambda: trained.step(reporting.step), trained.step, args.pairs)
        beside = (children_seconds() - before) / (args.pairs + WARM_UP)
        plain = statistics.median(b.used for _, b in pairs)
        wall = statistics.median(b.wall for _, b in pairs)
        own = [a.reporting for a, _ in pairs]
        print(f"load {os.getloadavg()[0]:.1f}; {args.pairs} pairs of steps", end="; ")
        print(f"a plain one takes {wall * 1e3:.1f} ms, {plain * 1e3:.1f} ms of processor time")
        print(f"with all reporting: {compare(pairs)}")
        exact = more("", [1 + seconds / plain for seconds in own]).strip()
        print(f"reporting itself: {statistics.median(own) * 1e3:.2f} ms a step, {exact};", end=" ")
        print(f"the trackers' processes {beside * 1e3:.2f} ms a step, {beside / plain:+.2%}")
        for name, profiled in (("without the profiler", False), ("with it", True)):
            if not args.recorded:
                break
            found = in_pairs(lambda p=profiled: trained.record(p), trained.step, args.recorded)
            read = statistics.median(seconds for (_, _, seconds), _ in found)
            print(f"a recorded step, {name}: {compare([(a, b) for (a, *_), b in found])}", end="; ")
            print(f"read once in {read:.2f} s of processor time")
            if profiled:
                _, spans, _ = found[-1][0]
                used = time.process_time()
                reporting.log.accounts.record(3, [ProcessSpans("worker 0", spans, Clock())])
                print(f"accounted for in {time.process_time() - used:.2f} s of processor time")
        reporting.log._trackers.finish({})
    trained.worker.close()


if __name__ == "__main__":
    main()
