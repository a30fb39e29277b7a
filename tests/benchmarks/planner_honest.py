"""What the planner predicts beside what is measured, on emulated devices of this machine.

    python tests/benchmarks/planner_honest.py [model.size=nano …]

Many plans of one GPT, each compiled and run. Printed are the predictions by `cost=model` (with
nominal rates, and calibrated as `task=calibrate` does) and by `cost=profile` (calibrated) beside
the fastest measured step, how far the last are off in 1, 2 and 4 stages, and the rank correlations
over all plans, also of what is measured with itself. Everything is measured anew: no cache is read.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

DEVICES = 4
STEPS = 16
METHODS: dict[str, dict[str, Any]] = {
    "data 4": {"method": "data"},
    "2 stages": {"method": "manual", "num_stages": 2},
    "4 stages": {"method": "manual", "num_stages": 4},
    "zero3 4": {"method": "zero3"},
    "model 4": {"method": "shard"},
    "data 2 model 2": {"method": "shard", "data": 2, "model": 2},
    "model 2, 2 stages": {"method": "three_d", "model": 2, "pipeline": 2},
}
# The first three are held to 20 %; the rest spans every method, few and many microbatches, and
# what else a pipeline has.
PLANS: list[tuple[str, dict[str, Any]]] = [
    *((name, {**METHODS[name], "num_micro_batches": 4}) for name in list(METHODS)[:3]),
    *((f"{name}, 1", {**of, "num_micro_batches": 1}) for name, of in METHODS.items()),
    *((f"{name}, 8", {**of, "num_micro_batches": 8}) for name, of in METHODS.items()),
    *(
        (f"{name}, {count}", {**METHODS[name], "num_micro_batches": count})
        for name, count in (("2 stages", 16), ("4 stages", 32), ("model 4", 32))
    ),
    *(
        (
            f"{name}, 8, {schedule}, remat {remat}",
            {**METHODS[name], "num_micro_batches": 8, "schedule": schedule, "remat": remat},
        )
        for name, schedule, remat in (
            ("2 stages", "1f1b", "full"),
            ("4 stages", "gpipe", "full"),
            ("4 stages", "zero_bubble", "none"),
        )
    ),
]


def runner(program: Any, plan: Any) -> Callable[[int], float]:
    """A function that runs one step and returns its seconds."""
    from launcher.runtime import compile_step

    step = compile_step(program.train, plan, jax.devices())
    held = [step.create(program.init, program.seed)]

    def run(number: int) -> float:
        batch = program.dataset.train(number)
        began = time.perf_counter()
        held[0], metrics = step(held[0], batch)
        jax.block_until_ready((held[0], metrics))
        return time.perf_counter() - began

    return run


def predictions(program: Any) -> tuple[list[list[float]], list[Any]]:
    """For every plan the seconds by each way to know them; and the plans to run."""
    from launcher.config.reader import build
    from launcher.config.schema import Config
    from launcher.driver.planning.plan_from_config import plan_of
    from launcher.plan import local_shape
    from launcher.plan.profile.calibration import measure

    nominal = local_shape(DEVICES, 1, "cpu")
    shape = measure(nominal)[0].applied(nominal)
    print(f"calibrated: {shape}")
    predicted, plans = [], []
    for _, settings in PLANS:
        found = [
            plan_of(
                build(Config, {"parallel": {**settings, "cost": cost}}).parallel,
                program.train,
                cluster,
            )
            for cluster, cost in ((nominal, "model"), (shape, "model"), (shape, "profile"))
        ]
        predicted.append([plan.predicted_step_seconds for plan in found])
        plans.append(found[0])
    return predicted, plans


def main(overrides: list[str]) -> None:
    """See the module."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    from scipy.stats import spearmanr

    from launcher.config.compose import load
    from launcher.train.program import build_program

    began = time.perf_counter()
    program = build_program(load(["train.eval_every=0", *overrides], []))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        predicted, plans = predictions(program)
    # In turn, so that what else the machine does falls on all of them.
    runners = [runner(program, plan) for plan in plans]
    durations = [[run(step) for run in runners] for step in range(STEPS)]
    rows = [(*p, min(d)) for p, d in zip(predicted, zip(*durations, strict=True), strict=True)]
    names = "model", "calibrated", "profile"
    print(f"{'plan':36} {names[0]:>9} {names[1]:>10} {names[2]:>9} {'measured':>9}")
    for (name, _), row in zip(PLANS, rows, strict=True):
        model, calibrated, profile, measured = (s * 1e3 for s in row)
        print(
            f"{name:36} {model:6.0f} ms {calibrated:7.0f} ms {profile:6.0f} ms {measured:6.0f} ms"
            f"  {profile / measured - 1:+.0%}"
        )
    *columns, measured = zip(*rows, strict=True)
    off = max(abs(p / m - 1) for p, m in zip(columns[2][:3], measured[:3], strict=True))
    print(f"cost=profile in 1, 2, 4 stages: at most {off:.0%} off (asked: 20 %)")
    for name, column in zip(names, columns, strict=True):
        rank = spearmanr(column, measured).statistic
        print(f"rank correlation over {len(rows)} plans, {name}: {rank:.2f} (asked: 0.9)")
    halves = [[min(d[k::2]) for d in zip(*durations, strict=True)] for k in (0, 1)]
    print(f"of one half of the measured steps with the other: {spearmanr(*halves).statistic:.2f}")
    print(f"load {os.getloadavg()[0]:.1f}; {time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main(sys.argv[1:])
