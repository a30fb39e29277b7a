"""What checking replicas costs: blocks of steps with one check each, beside blocks without.

    python tests/benchmarks/replica_check.py [--every 10] [--blocks 12]

An MLP of 512-2048-512-2048-512 under Adam, batch 512, on two devices, each with a replica. Blocks
of both kinds take turns, so that both see the same load; on a busy machine the share of processor
time that a check takes by itself tells more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

DEVICES = 2
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

from turns import ratio, worker_of  # noqa: E402

from launcher.runtime import check_equal  # noqa: E402

SETTINGS = (
    *("model=mlp", "model.widths=[2048,512,2048]", "model.input_size=512", "model.output_size=512"),
    *("dataset=synthetic", "train.global_batch_size=512", "train.steps=100000"),
    *("train.eval_every=0", "optimizer=adam", "parallel=data", "parallel.num_micro_batches=1"),
    *("cluster=emulated", f"cluster.gpus={DEVICES}"),
)


class Timed:
    """A worker that trains on, and the seconds of a block of steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        words = *SETTINGS, f"train.check_replicas_every={every}"
        self.worker, _, _ = worker_of(words, DEVICES)
        feed = self.worker._feeder
        batches = [feed.get(k)[0] for k in range(2)]  # made once: data is not the question
        feed.close()
        feed.get = lambda k: (batches[k % 2], 0.0)

    def block(self, checked: bool) -> tuple[float, float]:
        """Seconds, and the processor's, of the steps from check to check, with one or none."""
        began, used = time.perf_counter(), time.process_time()
        for k in range(self.every):
            # The number of a step says whether it is checked.
            number = self.every if checked and k == 0 else 1
            result = self.worker.step(number)
            check_equal(result.copies if result else ())
        check_equal(self.worker.flush().copies)
        return time.perf_counter() - began, time.process_time() - used

    def check(self) -> float:
        """Return the processor's seconds of one check by itself."""
        used = time.process_time()
        check_equal([self.worker._digester.finish(self.worker._digester.start(self.worker._state))])
        return time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=10, help="steps from check to check")
    parser.add_argument("--blocks", type=int, default=12, help="of each kind")
    args = parser.parse_args()
    timed = Timed(args.every)
    timed.block(True)
    timed.block(False)
    seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number in range(args.blocks):
        for checked in (number % 2 == 0, number % 2 == 1):
            seconds[checked].append(timed.block(checked))
    alone = statistics.median(timed.check() for _ in range(args.blocks))
    timed.worker.close()
    step = statistics.median(elapsed for elapsed, _ in seconds[False]) / args.every
    elapsed, used = (
        ratio([x[i] for x in seconds[True]], [x[i] for x in seconds[False]]) - 1 for i in range(2)
    )
    share = alone / statistics.median(cpu for _, cpu in seconds[False])
    print(
        f"{1e3 * step:.0f} ms a step; with a check every {args.every} steps: {elapsed:+.1%}, "
        f"of processor time {used:+.1%}; a check by itself takes {1e3 * alone:.0f} ms of it, "
        f"{share:.1%} of a block"
    )


if __name__ == "__main__":
    main()
