"""What reporting costs a step: steps with all of it beside plain ones, by turns.

    python tests/benchmarks/timeline_cost.py [--pairs 200] [--recorded 10] [SETTING …]

The default model in two stages of two devices, four microbatches, or what the settings say. A
reported step is logged by all that a run has: console, `metrics.jsonl`, Weights & Biases (offline),
`status.json` (at most once a second, as in a run) and the accounting's clock; its pair is the same
step without. In a run that is done by the driver, beside the next step; here it is waited for, with
what the trackers' threads do, so nothing of it is hidden, and none of it falls on a plain step. A
recorded step (`report.timeline_steps`; one a run by default) is compared in the same way.

It prints the median of the pairs' ratios with its 95 % confidence interval by the bootstrap; first
for processor time, which tells more on a busy machine.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

DEVICES = 4
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
import psutil  # noqa: E402
from turns import in_turns, more, table, worker_of  # noqa: E402

from launcher.driver.folder.folder import RunFolder, write_plan  # noqa: E402
from launcher.driver.folder.status import Status  # noqa: E402
from launcher.driver.record.run_log import RunLog  # noqa: E402
from launcher.report.console import make_console  # noqa: E402
from launcher.report.trackers.tracker import QueuedTracker  # noqa: E402
from launcher.train.step_result import StepResult, fetched_metrics, memory_bytes  # noqa: E402

SETTINGS = (
    *("train.steps=100000", "train.eval_every=0", "train.log_every=1", "wandb.mode=offline"),
    *("cluster=emulated", f"cluster.gpus={DEVICES}", "run.id=cost"),
    *("parallel=manual", "parallel.num_stages=2", "parallel.num_micro_batches=4"),
)
STATUS_SECONDS = 1.0  # from one writing of a run's status to the next


class Cost(NamedTuple):
    """Seconds of a step: of the clock, and of the processor."""

    wall: float
    used: float


class Trained:
    """A compiled step, its state, and a batch."""

    def __init__(self, settings: Sequence[str]) -> None:
        self.worker, self.config, self.plan = worker_of([*SETTINGS, *settings], DEVICES)
        self.run, self.state = self.worker._train, self.worker._state
        self.batch = self.worker._feeder.get(0)[0]
        self.count = 0

    def step(self, report: Callable[[StepResult], None] | None = None) -> Cost:
        """Make a step, and report it if there is something that reports."""
        began, used = time.perf_counter(), time.process_time()
        self.state, metrics = self.run(self.state, self.batch)
        jax.block_until_ready(self.state)
        values, _ = fetched_metrics(metrics)
        self.count += 1
        if report:
            found = {f"train/{name}": value for name, value in values.items()} | memory_bytes(None)
            found |= {"perf/step_seconds": time.perf_counter() - began, "data/stall_seconds": 0.0}
            report(StepResult(self.count, found, time.time()))
        return Cost(time.perf_counter() - began, time.process_time() - used)

    def record(self, profiled: bool) -> Cost:
        """Record a step."""
        began, used = time.perf_counter(), time.process_time()
        (self.state, metrics), read = self.run.record(self.state, self.batch, profiled=profiled)
        fetched_metrics(metrics)
        cost = Cost(time.perf_counter() - began, time.process_time() - used)
        read()
        return cost


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
        self.log.step_log.lap("training", result)
        self.log.step_log.record(result)
        if time.monotonic() - self._written > STATUS_SECONDS:
            self._written = time.monotonic()
            self._status._write()
        for tracker in self.log._registered:
            assert isinstance(tracker, QueuedTracker)
            done = threading.Event()
            tracker.forward(lambda _, done=done: done.set())
            done.wait()


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
    plain: list[Cost] = []

    def compared(name: str, step: Callable[[], Cost], count: int) -> tuple[str, str, str]:
        found = in_turns({"this": step, "plain": trained.step}, count)
        plain.extend(found["plain"])
        (wall, used), (plain_wall, plain_used) = (zip(*x, strict=True) for x in found.values())
        return name, more(used, plain_used), more(wall, plain_wall)

    with tempfile.TemporaryDirectory() as folder:
        reporting = Reporting(Path(folder), trained)
        before = children_seconds()
        reported = compared("reported", lambda: trained.step(reporting.step), args.pairs)
        trackers = (children_seconds() - before) / (args.pairs + 1)
        rows = [
            compared(f"recorded, {name}", lambda p=profiled: trained.record(p), args.recorded)
            for name, profiled in (("without the profiler", False), ("with it", True))
        ]
        wall, used = (statistics.median(seconds) for seconds in zip(*plain, strict=True))
        print(f"a plain step takes {wall * 1e3:.1f} ms, {used * 1e3:.1f} ms of processor time;")
        print(f"the trackers' processes take {trackers / used:.2%} of that for a reported step")
        table(("a step", "processor time", "wall"), [reported, *rows])
        reporting.log._trackers.finish({})
    trained.worker.close()


if __name__ == "__main__":
    main()
