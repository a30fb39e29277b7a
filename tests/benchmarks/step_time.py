"""Step and compile time of our pipeline beside plain `jax.jit`, interleaved in one process.

    python tests/benchmarks/step_time.py            # GPT: vocab 512, hidden 256, 8 layers, seq 128
    python tests/benchmarks/step_time.py --tiny     # hidden 16, seq 8: what dispatch alone costs

Every step function trains the same model on the same batches. The first table gives medians and
the losses at the end, which must agree; ratios are medians over the rounds, each round's times set
against its own, so that other load on the machine counts less. The second gives the Python thread's
processor time for a task and for a transfer, beside that of plain JAX's programs that take and give
as many arrays and compute nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from contest import SIZES, TINY, Contest
from turns import in_turns, ratio, table

import launcher
from launcher.plan import local_shape
from launcher.plan.methods import PipeshardParallel, UniformStageOption
from launcher.runtime import Executable, compile_step
from launcher.runtime.emit.instructions import Run
from launcher.trace import trace_step

KEY = jax.random.key(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()

    model = Contest(TINY if args.tiny else SIZES)
    contestants: dict[str, list[Any]] = {}  # what to call, its state, compile seconds
    steps = {
        "plain jit": model.step(jax.value_and_grad),
        "jit + scan": model.scanned(args.micro_batches),
    }
    for name, fun in steps.items():
        start = time.perf_counter()
        state = jax.jit(model.init)(KEY)
        compiled = jax.jit(fun, donate_argnums=0).lower(state, model.batch).compile()
        contestants[name] = [compiled, state, time.perf_counter() - start]
    for stages in args.stages:
        executable = pipeline(model, stages, args)
        state = executable.create(model.init, KEY)
        contestants[f"{stages} stages"] = [executable, state, executable.compile_seconds]

    def step(name: str) -> tuple[float, float, float]:
        entry, start = contestants[name], time.perf_counter()
        entry[1], loss = entry[0](entry[1], model.batch)
        sent = time.perf_counter() - start
        jax.block_until_ready((entry[1], loss))
        return time.perf_counter() - start, sent, float(loss)

    found = in_turns({name: functools.partial(step, name) for name in contestants}, args.rounds)
    taken = {name: [seconds for seconds, _, _ in steps] for name, steps in found.items()}
    base = contestants["plain jit"][2]
    table(
        ("", "step ms", "÷ jit", "÷ scan", "dispatch ms", "compile s", "÷ jit", "loss"),
        [
            (
                name,
                statistics.median(taken[name]) * 1e3,
                ratio(taken[name], taken["plain jit"]),
                ratio(taken[name], taken["jit + scan"]),
                statistics.median(sent for _, sent, _ in found[name]) * 1e3,
                compiling,
                compiling / base,
                f"{found[name][-1][2]:.5f}",
            )
            for name, (_, _, compiling) in contestants.items()
        ],
    )
    contestants.clear()
    print()
    # A tiny program may run in the calling thread, which counts as its cost then.
    for size, of, steps in [("tiny", Contest(TINY), 50)] + [("", model, 5)] * (not args.tiny):
        for stages in args.stages:
            task, empty, transfer = python_cost(of, pipeline(of, stages, args), steps)
            print(
                f"{f'{stages} stages, {size}'.strip(', ')}: {task * 1e6:.0f} µs a task (empty "
                f"programs: {empty * 1e6:.0f} µs), {transfer * 1e6:.0f} µs a transfer"
            )


def pipeline(model: Contest, stages: int, args: argparse.Namespace) -> Executable:
    """The model's step in stages of one device each."""
    step = model.step(launcher.value_and_grad)
    traced = trace_step(step, (jax.eval_shape(model.init, KEY), model.batch))
    option = UniformStageOption(stages)
    method = PipeshardParallel(args.micro_batches, stage_option=option, schedule=args.schedule)
    plan = method.plan(traced, local_shape(stages, 1, "cpu"))
    return compile_step(traced, plan, jax.devices()[:stages])


def python_cost(model: Contest, executable: Executable, steps: int) -> tuple[float, float, float]:
    """The calling thread's seconds for a task, for an empty program in its place, and for a
    transfer: medians over the steps."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    empty: list[float] = []

    def timed(call: Callable[..., Any], is_task: bool) -> Callable[..., Any]:
        count = 0

        def run(*arrays: Any) -> Any:
            nonlocal count
            shapes = [shape_of(x) for x in arrays]
            start = time.thread_time()
            results = call(*arrays)
            seconds[is_task].append(time.thread_time() - start)
            count += 1
            if is_task and count == 2:
                empty.extend(empty_seconds(shapes, [shape_of(x) for x in results]))
            return results

        return run

    entries = tuple(
        entry._replace(call=timed(entry.call, isinstance(entry.instruction, Run)))
        if entry.call
        else entry
        for entry in executable._table.entries
    )
    executable._table = dataclasses.replace(executable._table, entries=entries)
    state = executable.create(model.init, KEY)
    for _ in range(steps):
        state, _ = executable(state, model.batch)
        jax.block_until_ready(state)
    transfer = statistics.median(seconds[False])
    return statistics.median(seconds[True]), statistics.median(empty), transfer


def shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def empty_seconds(
    given: list[jax.ShapeDtypeStruct], results: list[jax.ShapeDtypeStruct]
) -> list[float]:
    """The calling thread's, of a few calls of a program that takes and gives such arrays."""

    def empty(*_: Any) -> list[Any]:
        return [jnp.zeros(x.shape, x.dtype) for x in results]

    placed = [x.sharding for x in results]
    compiled = jax.jit(empty, out_shardings=placed, keep_unused=True).lower(*given).compile()
    arrays = [jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding) for x in given]
    seconds = []
    for _ in range(10):
        start = time.thread_time()
        zeros = compiled(*arrays)
        seconds.append(time.thread_time() - start)
        jax.block_until_ready(zeros)
    return seconds[2:]


if __name__ == "__main__":
    main()
