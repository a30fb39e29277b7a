"""What saving costs: the step time with a save now and then, beside that without.

    python tests/benchmarks/saving_cost.py [--every 10] [--blocks 6]

Blocks of steps with one save at their beginning alternate with blocks without any. `under way` are
the steps that begin before the save is on the disk, the first of them also waits for the state to
be copied; `in between` are the others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

DEVICES = 2
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

from turns import ratio, table, worker_of  # noqa: E402

from launcher.driver.folder.folder import contents  # noqa: E402

MODEL = (
    *("model.num_layers=8", "model.hidden_size=256", "model.sequence_length=128"),
    *("train.global_batch_size=32", "train.steps=100000", "train.eval_every=0"),
    "train.checkpoint.every_minutes=10",  # for a worker that is made to save while it trains
    *("parallel=manual", f"parallel.num_stages={DEVICES}", "parallel.num_micro_batches=4"),
    *("cluster=emulated", f"cluster.gpus={DEVICES}"),
)


class Timed:
    """A worker that trains on, and the time of each step of it."""

    def __init__(self) -> None:
        self.worker, self.config, self.plan = worker_of(MODEL, DEVICES)
        self.step = 0

    def block(self, count: int, folder: str | None) -> tuple[float, list[float], list[float]]:
        """Seconds of `count` steps, and the step times while a save is under way and after it;
        a save to `folder` begins after the first step."""
        self.worker.flush()
        began = time.perf_counter()
        busy, free = [], []
        for k in range(count):
            self.step += 1
            saving = self.worker.writing(0)
            start = time.perf_counter()
            self.worker.step(self.step)
            if folder and k == 0:
                described = contents(self.config, self.plan.to_dict(), self.step)
                assert self.worker.saved() is None
                self.worker.save(folder, self.step, described, str(self.step))
                saving = True
            self.worker._sent.outcome.result()  # one at a time: a step's time is its own
            (busy if saving else free).append(time.perf_counter() - start)
        self.worker.flush()
        return time.perf_counter() - began, busy, free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=10, help="steps a block")
    parser.add_argument("--blocks", type=int, default=6, help="of each kind")
    args = parser.parse_args()
    timed = Timed()
    blocks: dict[bool, list[Any]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        timed.block(3, folder)
        for _ in range(args.blocks):
            for saves in (True, False):
                blocks[saves].append(timed.block(args.every, folder if saves else None))
            assert timed.worker.saved() is None
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files) / len(os.listdir(folder))
    timed.worker.close()
    steps = {
        "without saving": [x for block in blocks[False] for x in block[2]],
        "under way": [x for block in blocks[True] for x in block[1]],
        "in between": [x for block in blocks[True] for x in block[2]],
    }
    medians = {name: statistics.median(times) for name, times in steps.items() if times}
    none = medians["without saving"]
    heads = f"{size / 2**20:.1f} MiB a state", "ms a step", "more", "steps"
    rows = [(n, x * 1e3, f"{x / none - 1:+.1%}", str(len(steps[n]))) for n, x in medians.items()]
    table(heads, rows)
    more = ratio(*([block[0] for block in blocks[saves]] for saves in (True, False))) - 1
    print(f"a save every {args.every} steps: {more:+.1%} in all")


if __name__ == "__main__":
    main()
