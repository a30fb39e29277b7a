"""What recording costs a step: recorded steps beside plain ones, each alone, in turns.

    python tests/benchmarks/timeline_cost.py [--rounds 20] [SETTING …]

The default model in two stages of two devices, four microbatches, or what the settings say. A plain
step is waited for, as a recorded one is. "recorded" has all but JAX's profiler, "with the profiler"
all; reading what was recorded comes after the step, beside the next one, and is given apart. On a
busy machine the share of processor time tells more.

    python tests/benchmarks/timeline_cost.py --blocks 10

instead compares blocks of 20 steps with all reporting (one step is recorded, its trace is kept, and
the accounting is written) with plain ones, in turns: processor time of the median step, and of all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

DEVICES = 4
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402

from launcher.config.compose import load, to_dict  # noqa: E402
from launcher.driver.plan_from_config import plan_of  # noqa: E402
from launcher.plan import local_shape  # noqa: E402
from launcher.report.account import Known, account  # noqa: E402
from launcher.report.timeline import ProcessSpans, Timeline  # noqa: E402
from launcher.spans import Clock  # noqa: E402
from launcher.train.recordings import Recordings, trace_folder  # noqa: E402
from launcher.train.worker import TrainWorker  # noqa: E402

SETTINGS = (
    *("train.steps=100000", "train.eval_every=0", "cluster=emulated", f"cluster.gpus={DEVICES}"),
    *("parallel=manual", "parallel.num_stages=2", "parallel.num_micro_batches=4"),
)
STEPS, RECORDED = 20, 4  # of a block
KINDS = {"plain": None, "recorded": False, "with the profiler": True}


class Timed:
    """A compiled step, its state, and a batch."""

    def __init__(self, settings: list[str]) -> None:
        config = load([*SETTINGS, *settings])
        self.worker = TrainWorker()
        self.worker.build(to_dict(config))
        plan = plan_of(config.parallel, self.worker._program.train, local_shape(DEVICES, 1, "cpu"))
        self.worker.setup(plan.to_dict())
        self.plan = plan
        self.worker.create()
        self.run, self.state = self.worker._train, self.worker._state
        self.batch = self.worker._feeder.get(0)[0]

    def step(self, profiled: bool | None) -> tuple[float, float, float]:
        """Seconds of a step, the processor's, and those of reading it."""
        began, used = time.perf_counter(), time.process_time()
        if profiled is None:
            results, read = self.run(self.state, self.batch), list
            jax.block_until_ready(results)
        else:
            results, read = self.run.record(self.state, self.batch, profiled=profiled)
        elapsed, used = time.perf_counter() - began, time.process_time() - used
        self.state = results[0]
        began = time.perf_counter()
        read()
        return elapsed, used, time.perf_counter() - began

    def block(self, folder: Path | None) -> list[float]:
        """Processor seconds of a block's steps, with all reporting if there is a folder for it."""
        recordings, seconds = Recordings(), []
        for step in range(STEPS):
            used = time.process_time()
            if folder and step == RECORDED:
                kept = trace_folder(str(folder), 0, step)
                results, read = self.run.record(self.state, self.batch, keep=kept)
                recordings.add(step, read)
            else:
                results = self.run(self.state, self.batch)
                jax.block_until_ready(results)
            self.state = results[0]
            for found in recordings.take():
                parts = [ProcessSpans("worker 0", found.spans, Clock())]
                timeline = Timeline().with_step(step, parts)
                timeline.save(folder / "timeline.json")
                account(self.plan, Known(32), step, timeline.steps[step]).save(folder)
            seconds.append(time.process_time() - used)
        recordings.wait()
        recordings.close()
        return seconds


def blocks(timed: Timed, count: int) -> None:
    """Compare blocks of steps, in turns; the first pair warms up."""
    pairs = []
    for number in range(count + 1):
        with tempfile.TemporaryDirectory() as folder:
            order = [None, Path(folder)] if number % 2 else [Path(folder), None]
            found = {bool(each): timed.block(each) for each in order}
        if number:
            pairs.append((found[True], found[False]))
    middle = [statistics.median(a) / statistics.median(b) - 1 for a, b in pairs]
    whole = [sum(a) / sum(b) - 1 for a, b in pairs]
    print(f"load {os.getloadavg()[0]:.1f}; {count} pairs of {STEPS} steps, one of them recorded")
    for name, ratios in (("median step", middle), ("all steps", whole)):
        low, high = min(ratios), max(ratios)
        print(f"{name:12} {statistics.median(ratios):+6.1%} ({low:+.1%} to {high:+.1%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--blocks", type=int, default=0)
    args = parser.parse_args()
    timed = Timed(args.settings)
    if args.blocks:
        blocks(timed, args.blocks)
        timed.worker.close()
        return
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}
    for number in range(args.rounds + 1):
        order = list(KINDS)[number % 3 :] + list(KINDS)[: number % 3]
        for kind in order:
            times = timed.step(KINDS[kind])
            if number:  # the first round warms up
                found[kind].append(times)
    timed.worker.close()
    print(f"load {os.getloadavg()[0]:.1f}")
    for kind, times in found.items():
        pairs = list(zip(times, found["plain"], strict=True))
        elapsed, used = (statistics.median(a[i] / b[i] - 1 for a, b in pairs) for i in range(2))
        step, _, reading = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
        print(
            f"{kind:18} {step:7.1f} ms a step {elapsed:+6.1%}, of processor time {used:+6.1%}; "
            f"read in {reading:.0f} ms"
        )


if __name__ == "__main__":
    main()
