"""What the planner predicts beside what is measured, on emulated devices of this machine.

    python tests/benchmarks/planner_honest.py [model.size=nano …]

Many plans of one GPT, each compiled and run. Printed are the predictions by `cost=model` and by
`cost=profile` beside the fastest measured step, how far the latter are off in 1, 2 and 4 stages,
and the rank correlation over all plans.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

DEVICES = 4
STEPS = 15
MANY = {"num_micro_batches": 8}
PLANS: list[tuple[str, dict[str, Any]]] = [
    ("1 stage, data 4", {"method": "data", "num_micro_batches": 4}),
    ("2 stages", {"method": "manual", "num_stages": 2, "num_micro_batches": 4}),
    ("4 stages", {"method": "manual", "num_stages": 4, "num_micro_batches": 4}),
    ("1 stage, data 4, 1 microbatch", {"method": "data", "num_micro_batches": 1}),
    ("1 stage, data 4, 8 microbatches", {"method": "data", **MANY}),
    ("zero3", {"method": "zero3", "num_micro_batches": 4}),
    ("shard 4", {"method": "shard", "num_micro_batches": 4}),
    ("shard 2x2", {"method": "shard", "data": 2, "model": 2, "num_micro_batches": 2}),
    ("3d 1x2x2", {"method": "three_d", "model": 2, "pipeline": 2, "num_micro_batches": 4}),
    ("4 stages, 1 microbatch", {"method": "manual", "num_stages": 4, "num_micro_batches": 1}),
    ("4 stages, 2 microbatches", {"method": "manual", "num_stages": 4, "num_micro_batches": 2}),
    ("4 stages, 16 microbatches", {"method": "manual", "num_stages": 4, "num_micro_batches": 16}),
    (
        "4 stages, gpipe, remat",
        {
            "method": "manual",
            "num_stages": 4,
            "num_micro_batches": 8,
            "schedule": "gpipe",
            "remat": "full",
        },
    ),
    ("2 stages, remat", {"method": "manual", "num_stages": 2, **MANY, "remat": "full"}),
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


def main(overrides: list[str]) -> None:
    """See the module."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    from scipy.stats import spearmanr

    from launcher.config.compose import load
    from launcher.plan import local_shape, make_plan
    from launcher.train.program import build_program

    program = build_program(load(["train.eval_every=0", *overrides], []))
    cluster = local_shape(DEVICES, 1, "cpu")
    print(
        f"{'plan':34} {'model':>9} {'profile':>9} {'measured':>9}   load {os.getloadavg()[0]:.1f}"
    )
    predicted, runners = [], []
    for _, settings in PLANS:
        plans = [
            make_plan(program.train, cluster=cluster, cost=cost, say=print, **settings)
            for cost in ("model", "profile")
        ]
        predicted.append([plan.predicted_step_seconds for plan in plans])
        runners.append(runner(program, plans[0]))
    # In turn, so that what else the machine does falls on all of them.
    durations = [[run(step) for run in runners] for step in range(STEPS)]
    rows = [(*p, min(d)) for p, d in zip(predicted, zip(*durations, strict=True), strict=True)]
    for (name, _), row in zip(PLANS, rows, strict=True):
        shown = " ".join(f"{s * 1e3:6.0f} ms" for s in row)
        print(f"{name:34} {shown}   {row[1] / row[2] - 1:+.0%}")
    model, profile, measured = zip(*rows, strict=True)
    off = max(abs(p / m - 1) for p, m in zip(profile[:3], measured[:3], strict=True))
    print(f"cost=profile in 1, 2, 4 stages: at most {off:.0%} off (asked: 20 %)")
    for name, predicted in (("model", model), ("profile", profile)):
        rank = spearmanr(predicted, measured).statistic
        print(f"rank correlation over {len(rows)} plans, cost={name}: {rank:.2f} (asked: 0.9)")


if __name__ == "__main__":
    main(sys.argv[1:])
