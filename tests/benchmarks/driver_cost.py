"""What a step costs the driver: sending it to two workers and taking their answers.

    python tests/benchmarks/driver_cost.py

The workers answer at once with what a step reports, so that nothing but the driver's part is left.
Steps are sent two ahead, as the training loop does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

from launcher.cluster.devices import emulated_pool
from launcher.cluster.ray.private_ray import PrivateRay
from launcher.config.cluster import Emulated
from launcher.driver.loop import IN_FLIGHT
from launcher.driver.workers import Workers
from launcher.train.step_result import StepResult

METRICS = ("loss", "grad_norm", "learning_rate")


class Worker:
    """Answers like `launcher.train.worker.TrainWorker`."""

    def step(self, step: int, profile: bool) -> StepResult:
        metrics = {f"train/{name}": float(step) for name in METRICS}
        metrics |= {"perf/step_seconds": 0.1, "data/wait_seconds": 0.0}
        metrics |= {f"pipeline/stage_{i}_seconds": 0.1 for i in range(2)}
        return StepResult(step, metrics, time.time())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from driver_cost import Worker  # by its module's name, which workers can import

    pool = emulated_pool(Emulated(gpus=2, hosts=2))
    with tempfile.TemporaryDirectory() as logs, PrivateRay(pool, Path(logs)) as session:
        # The plan is needed for measured stages only.
        workers = Workers(session.spawn(Worker), None, session.check, timeout=600.0)
        workers.submit("step", 0, False).result()
        calls: deque = deque()
        seconds = []
        for step in range(args.steps):
            began = time.thread_time()
            calls.append(workers.submit("step", step, False))
            while len(calls) >= IN_FLIGHT:
                calls.popleft().result()
            seconds.append(time.thread_time() - began)
    print(f"{statistics.median(seconds) * 1e3:.2f} ms of the driver's processor a step, 2 workers")


if __name__ == "__main__":
    main()
