"""What snapshots cost training: a few steps around one beside as many without, by turns.

    python tests/benchmarks/snapshot_cost.py [--pairs 60] [SETTING …]

The default model in two stages, or what the settings say. A snapshot is copied whole to a second
folder, as it is to another host that has no replica. Prints what the pairs differ by, as a part of
the time from one snapshot of a run to the next (`train.snapshot=auto`): its mean and its 95 %
interval by the bootstrap, first for processor time, with all threads', which tells more on a busy
machine.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from pathlib import Path

DEVICES = 2
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import numpy as np  # noqa: E402
import ray  # noqa: E402
from scipy.stats import bootstrap  # noqa: E402
from turns import table, worker_of  # noqa: E402

from launcher.checkpoint import HostPlace, Moment  # noqa: E402
from launcher.cluster.ray import NodeFolder  # noqa: E402
from launcher.driver.loop import SNAPSHOT_SHARE  # noqa: E402
from launcher.train.step_result import StepResult  # noqa: E402

SETTINGS = (
    *("train.steps=100000", "train.eval_every=0", "cluster=emulated", f"cluster.gpus={DEVICES}"),
    *("parallel=manual", f"parallel.num_stages={DEVICES}", "parallel.num_micro_batches=4"),
)
_STEPS = 4


class Trained:
    """A worker that trains on."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.worker, _, _ = worker_of([*SETTINGS, *words], DEVICES)
        self.saver, self.step, self.spent = self.worker._saver, 0, 0.0
        pieces = self.saver.keep_snapshots(folder, HostPlace(0), self.worker._state, Moment(0, 0))
        assert not isinstance(pieces, str), pieces
        self.size = sum(pieces.values())
        other = folder / "other"
        other.mkdir()
        assert self.saver.snapshots.exchange(list(pieces), NodeFolder.here(other), 0) is None

    def take(self, result: StepResult | None) -> None:
        """Note what the newest snapshot has cost, if a step's result tells it."""
        if result is not None:
            self.spent = result.metrics.get("perf/snapshot_seconds", self.spent)

    def block(self, steps: int, snapshot: bool) -> tuple[float, float]:
        """Return the processor time and the time of a block, in which all of it ends."""
        began, used = time.perf_counter(), time.process_time()
        for k in range(steps):
            self.step += 1
            self.take(self.worker.step(self.step))
            if snapshot and k == 0:
                self.take(self.worker.snapshot(self.step))
        while snapshot and self.saver.snapshots.newest < self.step - steps + 1:
            time.sleep(0.01)
        self.take(self.worker.flush())
        return time.process_time() - used, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        trained = Trained(args.settings, Path(name))
        for _ in range(3):  # the first one compiles, and touches the memory
            trained.block(10, snapshot=True)
        _, seconds = trained.block(10, snapshot=False)
        steps = math.ceil(trained.spent / (SNAPSHOT_SHARE * seconds / 10))
        size, cost = trained.size / 2**20, trained.spent * 1e3
        print(f"{size:.1f} MiB, {cost:.0f} ms: one in {steps} steps of {seconds * 100:.0f} ms")
        pairs = [
            [trained.block(_STEPS, snapshot) for snapshot in (True, False)]
            for _ in range(args.pairs)
        ]
        trained.worker.close()
    taken, plain = np.array(pairs).swapaxes(0, 1)  # [pairs, kinds of time]
    shares = (taken - plain) / (np.mean(plain, axis=0) / _STEPS * steps)
    rows = []
    for kind, each in zip(("processor time", "time"), shares.T, strict=True):
        found = bootstrap((each,), np.mean, method="percentile", rng=0).confidence_interval
        rows.append((kind, f"{each.mean():+.2%}", f"{found.low:+.2%} to {found.high:+.2%}"))
    table(("", "more with snapshots", "95 %"), rows)


if __name__ == "__main__":
    main()
