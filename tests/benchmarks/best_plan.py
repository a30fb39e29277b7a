"""How much slower `auto`'s plan is than the best of ten plans by hand, on this machine's devices.

    python tests/benchmarks/best_plan.py [gpt] [mlp] [convolution]

A GPT, an MLP and a convolutional network on four emulated devices. Printed are the steps of the
plans by hand, of `auto` by nominal rates (`parallel.cost=model`) and by rates that are measured
first (`measured`), and of the fastest of the latter's best three as tried (`parallel.try=3`), each
as its fastest step; all are run in turn, so that what else the machine does falls on all of them.
Beside them stand the processor time of a step over all cores, which other work disturbs least and
no step is below, and what the measured rates predict. The last lines are the ratios alone, to the
best plan by hand, by each way. Everything is measured anew: no cache is read.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from turns import in_turns, table

import launcher

DEVICES = 4
ROUNDS = 20
STAGES = {"method": "manual", "num_micro_batches": 4}
HAND: dict[str, tuple[int, dict[str, Any]]] = {  # number of devices, settings
    "one device": (1, {"method": "data"}),
    "data": (4, {"method": "data"}),
    "data, 4 microbatches": (4, {"method": "data", "num_micro_batches": 4}),
    "zero3": (4, {"method": "zero3"}),
    "model 4": (4, {"method": "shard", "model": 4}),
    "data 2, model 2": (4, {"method": "shard", "data": 2, "model": 2}),
    "2 stages of 1, 4 microbatches": (2, {**STAGES, "num_stages": 2}),
    "2 stages of 2, 4 microbatches": (4, {**STAGES, "num_stages": 2}),
    "4 stages, 4 microbatches": (4, {**STAGES, "num_stages": 4}),
    "4 stages, 8 microbatches": (4, {**STAGES, "num_stages": 4, "num_micro_batches": 8}),
}


def from_settings(*words: str) -> Any:
    """The program of a run: its train step, first state and batch."""
    from launcher.config.compose import load
    from launcher.train.program import build_program

    program = build_program(load(["train.eval_every=0", *words], []))
    return SimpleNamespace(
        step=program.train,
        init=program.init,
        arguments=(program.seed,),
        batch=program.dataset.train(0),
    )


def convolution() -> Any:
    """Four blocks of convolutions on images, trained by gradient descent."""
    from launcher.trace import trace_step

    channels, rows, size = (3, 32, 32, 64, 64), 32, 32

    def init(seed: int) -> Any:
        keys = jax.random.split(jax.random.key(seed), len(channels))
        pairs = zip(keys, channels, channels[1:], strict=False)
        kernels = [0.1 * jax.random.normal(key, (3, 3, i, o)) for key, i, o in pairs]
        return [*kernels, 0.1 * jax.random.normal(keys[-1], (channels[-1], 10))]

    def loss(weights: Any, batch: Any) -> Any:
        x, labels = batch
        for k, kernel in enumerate(weights[:-1]):
            if k:
                launcher.mark_pipeline_boundary()
            dims = ("NHWC", "HWIO", "NHWC")
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)
            )
        logits = x.mean((1, 2)) @ weights[-1]
        return -(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, 10)).sum(-1).mean()

    def step(weights: Any, batch: Any) -> Any:
        value, grads = launcher.value_and_grad(loss)(weights, batch)
        return [w - 0.01 * g for w, g in zip(weights, grads, strict=True)], value

    batch = jax.random.normal(jax.random.key(1), (rows, size, size, 3)), jnp.arange(rows) % 10
    shapes = jax.eval_shape(init, 0), jax.eval_shape(lambda: batch)
    traced = trace_step(step, shapes, batch_argnums=(1,), donate_argnums=(0,))
    return SimpleNamespace(step=traced, init=init, arguments=(0,), batch=jax.device_get(batch))


CASES: dict[str, Callable[[], Any]] = {
    "gpt": from_settings,
    "mlp": lambda: from_settings(
        "model=mlp", "dataset=synthetic", "model.hidden_size=512", "train.global_batch_size=256"
    ),
    "convolution": convolution,
}


class Step(NamedTuple):
    """The seconds of a step, and its processor seconds over all cores."""

    seconds: float
    processor: float


def runner(case: Any, plan: Any) -> Callable[[int], Step]:
    """A function that runs so many steps and returns the means of one."""
    from launcher.runtime import compile_step

    step = compile_step(case.step, plan, jax.devices())
    held = [step.create(case.init, *case.arguments)]
    cores = len(os.sched_getaffinity(0))

    def run(steps: int) -> Step:
        began, before = time.perf_counter(), time.process_time()
        for _ in range(steps):
            held[0], metrics = step(held[0], case.batch)
        jax.block_until_ready((held[0], metrics))
        processor = (time.process_time() - before) / cores
        return Step((time.perf_counter() - began) / steps, processor / steps)

    run(1)
    return run


def compare(name: str, shape: Any) -> dict[str, float]:
    """Print one case, and return the ratio of each way to the best plan by hand."""
    from launcher.config.reader import build
    from launcher.config.schema import Config
    from launcher.driver.planning.plan_from_config import plan_of, plans_of
    from launcher.driver.tries import timed_rounds
    from launcher.plan import PlanError, describe_plan, local_shape
    from launcher.plan.build import build_plan
    from launcher.trace import TraceError

    case = CASES[name]()

    def parallel(**settings: Any) -> Any:
        return build(Config, {"parallel": settings}).parallel

    plans: dict[str, Any] = {}
    for words, (count, settings) in HAND.items():
        try:
            plans[words] = plan_of(parallel(**settings), case.step, local_shape(count, 1, "cpu"))
        except (PlanError, TraceError) as error:
            print(f"{name}: {words} cannot be: {str(error).splitlines()[0]}")
    by_hand = list(plans)
    best = plans_of(parallel(method="auto"), case.step, shape, how_many=lambda best: 3)
    nominal = plan_of(parallel(method="auto"), case.step, local_shape(DEVICES, 1, "cpu"))
    plans |= {"nominal": nominal, "measured": best[0]}
    runs = {words: runner(case, plan) for words, plan in plans.items()}
    tries = [runner(case, plan) for plan in best]
    seconds = [timed_rounds(lambda steps, run=run: run(steps).seconds) for run in tries]
    fastest = seconds.index(min(seconds))
    plans["tried"], runs["tried"] = best[fastest], tries[fastest]
    steps = in_turns({words: functools.partial(run, 2) for words, run in runs.items()}, ROUNDS)
    least = {words: Step(*map(min, zip(*each, strict=True))) for words, each in steps.items()}
    limit = min(least[words].seconds for words in by_hand)
    rows = []
    for words, step in least.items():
        found = words if words in by_hand else f"auto, {words}: {describe_plan(plans[words])}"
        predicted = build_plan(case.step, plans[words].assignment, shape).predicted_step_seconds
        milliseconds = (1e3 * seconds for seconds in (*step, predicted))
        rows.append((found, *milliseconds, f"{step.seconds / limit:.3f}"))
    table((name, "fastest, ms", "processor, ms", "predicted, ms", "ratio"), rows)
    return {way: least[way].seconds / limit for way in ("nominal", "measured", "tried")}


def main(names: list[str]) -> None:
    """See the module."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    from launcher.plan import local_shape
    from launcher.plan.profile.calibration import measure

    nominal = local_shape(DEVICES, 1, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        began = time.perf_counter()
        shape = measure(nominal, quick=True)[0].applied(nominal)
        print(f"measured in {time.perf_counter() - began:.1f} s: {shape}", flush=True)
        found = {name: compare(name, shape) for name in names or CASES}
    for name, ratios in found.items():
        print(f"{name}: " + ", ".join(f"{way} {ratio:.3f}" for way, ratio in ratios.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
