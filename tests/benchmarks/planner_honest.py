"""What the planner predicts beside what is measured, on emulated devices of this machine.

    python tests/benchmarks/planner_honest.py [model.size=nano …]

Many plans of one GPT, each compiled and run. Printed are the predictions by `cost=model` (with
nominal rates, and calibrated as `task=calibrate` does) and by `cost=profile` (calibrated) beside
the fastest measured step, and how far the last are off in 1, 2 and 4 stages; for each way the mean
error, the rank correlation and the step of the plan that it would choose over the best one's; and
the rank correlation of what is measured with itself. Everything is measured anew: no cache is read.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import jax
from best_plan import runner
from turns import in_turns, table

from launcher.base.process_setup import keep_memory

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
    *((f"{name}, 1", {**settings, "num_micro_batches": 1}) for name, settings in METHODS.items()),
    *((f"{name}, 8", {**settings, "num_micro_batches": 8}) for name, settings in METHODS.items()),
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
    keep_memory()  # as workers do
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    from scipy.stats import spearmanr

    from launcher.config.compose import load
    from launcher.train.program import build_program

    program = build_program(load(["train.eval_every=0", *overrides], []))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        predicted, plans = predictions(program)
    case = SimpleNamespace(
        step=program.train,
        init=program.init,
        arguments=(program.seed,),
        batch=program.dataset.train(0),
    )
    runs = {name: runner(case, plan) for (name, _), plan in zip(PLANS, plans, strict=True)}
    steps = in_turns({name: lambda run=run: run(1).seconds for name, run in runs.items()}, STEPS)
    measured = [min(each) for each in steps.values()]
    ways = "model", "calibrated", "profile"
    rows = [
        (name, *(1e3 * x for x in (*three, step)), f"{three[2] / step - 1:+.0%}")
        for name, three, step in zip(steps, predicted, measured, strict=True)
    ]
    table(("ms a step", *ways, "measured", "profile is off"), rows)
    columns = list(zip(*predicted, strict=True))
    off = max(abs(p / m - 1) for p, m in zip(columns[2][:3], measured[:3], strict=True))
    print(f"cost=profile in 1, 2, 4 stages: at most {off:.0%} off")
    for way, column in zip(ways, columns, strict=True):
        rank = spearmanr(column, measured).statistic
        error = statistics.mean(abs(p / m - 1) for p, m in zip(column, measured, strict=True))
        chosen = measured[column.index(min(column))] / min(measured)
        print(
            f"{way}: {error:.1%} off in the mean of {len(rows)} plans, rank correlation "
            f"{rank:.2f}; the plan chosen takes {chosen:.3f} of the best one's step"
        )
    halves = [[min(each[k::2]) for each in steps.values()] for k in (0, 1)]
    print(f"of one half of the measured steps with the other: {spearmanr(*halves).statistic:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
