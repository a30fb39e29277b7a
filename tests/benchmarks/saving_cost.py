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

DEVICES = 2
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

from launcher.config.compose import load, to_dict  # noqa: E402
from launcher.driver.loop import contents  # noqa: E402
from launcher.driver.planning.plan_from_config import plan_of  # noqa: E402
from launcher.plan import local_shape  # noqa: E402
from launcher.train.program import build_program  # noqa: E402
from launcher.train.worker import TrainWorker  # noqa: E402

MODEL = (
    "model.num_layers=8",
    "model.hidden_size=256",
    "model.sequence_length=128",
    "train.global_batch_size=32",
    "train.steps=100000",
    "train.eval_every=0",
    "train.checkpoint.every_minutes=10",  # for a worker that is made to save while it trains
    "parallel=manual",
    f"parallel.num_stages={DEVICES}",
    "parallel.num_micro_batches=4",
    "cluster=emulated",
    f"cluster.gpus={DEVICES}",
)


class Timed:
    """A worker that trains on, and the time of each step of it."""

    def __init__(self) -> None:
        config = load(MODEL)
        program = build_program(config)
        cluster = local_shape(DEVICES, 1, "cpu")
        self.plan = plan_of(config.parallel, program.train, cluster)
        self.config = config
        self.worker = TrainWorker()
        self.worker.build(to_dict(config))
        self.worker.setup(self.plan.to_dict())
        self.worker.create()
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
            at = time.perf_counter()
            self.worker.step(self.step)
            if folder and k == 0:
                described = contents(self.config, self.plan, self.step)
                assert self.worker.saved() is None
                self.worker.save(folder, self.step, described, str(self.step))
                saving = True
            self.worker._sent.outcome.result()  # one at a time: a step's time is its own
            (busy if saving else free).append(time.perf_counter() - at)
        self.worker.flush()
        return time.perf_counter() - began, busy, free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=10, help="steps a block")
    parser.add_argument("--blocks", type=int, default=6, help="of each kind")
    args = parser.parse_args()
    timed = Timed()
    with tempfile.TemporaryDirectory() as folder:
        timed.block(3, folder)
        totals: dict[bool, list[float]] = {True: [], False: []}
        busy: list[float] = []
        between: list[float] = []
        without: list[float] = []
        for _ in range(args.blocks):
            for saves in (True, False):
                total, under_way, free = timed.block(args.every, folder if saves else None)
                totals[saves].append(total)
                busy += under_way
                (between if saves else without).extend(free)
            assert timed.worker.saved() is None
        size = sum(
            os.path.getsize(os.path.join(root, name))
            for root, _, names in os.walk(folder)
            for name in names
        ) / len(os.listdir(folder))
    timed.worker.close()
    none = statistics.median(without)
    print(f"{size / 2**20:.1f} MiB a state; steps in ms, beside {none * 1e3:.0f} without saving:")
    for name, times in (("under way", busy), ("in between", between)):
        if times:
            middle = statistics.median(times)
            print(
                f"  {name:<10} {middle * 1e3:6.0f}  {middle / none - 1:+.1%}  ({len(times)} steps)"
            )
    ratios = [a / b - 1 for a, b in zip(totals[True], totals[False], strict=True)]
    print(f"a save every {args.every} steps: {statistics.median(ratios):+.1%} in all")


if __name__ == "__main__":
    main()
