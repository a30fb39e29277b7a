"""What a step costs the driver: sending it to two workers and taking their answers.

    python tests/benchmarks/driver_cost.py

The workers answer at once with what a step reports, so that nothing but the driver's part is left.
Steps are sent ahead as the training loop sends them.
"""

from __future__ import annotations

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

STEPS = 500
METRICS = (
    *("train/loss", "train/grad_norm", "train/learning_rate", "perf/step_seconds"),
    *("data/wait_seconds", "pipeline/stage_0_seconds", "pipeline/stage_1_seconds"),
)


class Worker:
    """Answers like `launcher.train.worker.TrainWorker`."""

    def step(self, step: int, profile: bool) -> StepResult:
        return StepResult(step, dict.fromkeys(METRICS, float(step)), time.time())


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from driver_cost import Worker  # by its module's name, which workers can import

    pool = emulated_pool(Emulated(gpus=2, hosts=2))
    with tempfile.TemporaryDirectory() as logs, PrivateRay(pool, Path(logs)) as session:
        # The plan is needed for measured stages only.
        workers = Workers(session.spawn(Worker), None, session.check, timeout=600.0)
        workers.submit("step", 0, False).result()
        calls: deque = deque()
        seconds = []
        for step in range(STEPS):
            began = time.thread_time()
            calls.append(workers.submit("step", step, False))
            while len(calls) >= IN_FLIGHT:
                calls.popleft().result()
            seconds.append(time.thread_time() - began)
    print(f"{statistics.median(seconds) * 1e3:.2f} ms of the driver's processor a step, 2 workers")


if __name__ == "__main__":
    main()
