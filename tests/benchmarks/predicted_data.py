"""Predicted beside measured steps of data parallelism in two processes, after a calibration.

    python tests/benchmarks/predicted_data.py [--rounds 8] [--widths 512 2048]

MLPs of four layers as wide as asked, Adam, two processes of one device each, as `cluster=emulated
cluster.hosts=2 parallel=data` runs them. The calibration is made anew (no cache is read or written)
before the rounds and after them; in between the sizes take turns, a few steps each. Printed are the
fastest step, its processor time, which other load changes less, and the predictions by nominal and
by both calibrated rates, with their ratios to both.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from typing import Any

from turns import Player, free_address, in_turns, joined, serve, table, turn

SETTINGS = (
    *("model=mlp", "model.num_layers=4", "dataset=synthetic", "train.global_batch_size=256"),
    *("optimizer=adam", "parallel=data", "parallel.num_micro_batches=1"),
    *("cluster=emulated", "cluster.gpus=2", "cluster.hosts=2"),
)


def planned(width: int, shape: Any) -> tuple[Any, Any]:
    from launcher.config.compose import load
    from launcher.driver.planning.plan_from_config import plan_of
    from launcher.train.program import build_program

    sizes = ("input", "hidden", "output")
    config = load([*SETTINGS, *(f"model.{size}_size={width}" for size in sizes)])
    program = build_program(config)
    return program, plan_of(config.parallel, program.train, shape)


def play(index: int, address: str, widths: list[int], steps: int) -> None:
    """One process: some steps of a width for each line; the seconds of each, and the processor's
    of one."""
    import jax

    from launcher.plan import local_shape
    from launcher.runtime import compile_step

    transport, held = joined(address, index), {}
    for width in widths:
        program, plan = planned(width, local_shape(2, 2, "cpu"))
        run = compile_step(program.train, plan, jax.devices(), transport)
        held[str(width)] = [run, run.create(program.init, program.seed), program.dataset.train(0)]

    def timed(width: str) -> tuple[list[float], float]:
        run, state, batch = held[width]
        seconds, used = [], time.process_time()
        for _ in range(steps):
            began = time.perf_counter()
            state, metrics = run(state, batch)
            jax.block_until_ready((state, metrics))
            seconds.append(time.perf_counter() - began)
        held[width][1] = state
        return seconds, (time.process_time() - used) / steps

    serve(timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--role", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        play(int(args.role[0]), args.role[1], args.widths, args.steps)
        return
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": cache}
        compare(args)


def compare(args: argparse.Namespace) -> None:
    from launcher.cluster.devices import emulated_pool
    from launcher.cluster.measure import measure_links
    from launcher.cluster.ray.environment import worker_environment
    from launcher.config.machines import Emulated
    from launcher.plan import local_shape
    from launcher.plan.profile.calibration import HostLinks, measure

    nominal, pool = local_shape(2, 2, "cpu"), emulated_pool(Emulated(gpus=2, hosts=2))

    def calibrated() -> Any:
        return HostLinks(measure_links(pool)).applied(measure(nominal)[0].applied(nominal))

    shapes = {"nominal": nominal, "calibrated before": calibrated()}
    words = f"--steps={args.steps}", "--widths", *map(str, args.widths), "--role"
    address = free_address()
    peers = [
        Player(*words, str(i), address, env=worker_environment(os.environ, pool, i))
        for i in range(2)
    ]
    try:
        for peer in peers:
            peer.answer()
        calls = {str(w): functools.partial(turn, peers, str(w)) for w in args.widths}
        rounds = in_turns(calls, args.rounds)
    finally:
        for peer in peers:
            peer.process.kill()
    shapes["calibrated after"] = calibrated()
    rows = []
    for width in args.widths:
        answers, cores = rounds[str(width)], len(os.sched_getaffinity(0))
        # A step is over when both processes have made it.
        fastest = min(max(pair) for (a, _), (b, _) in answers for pair in zip(a, b, strict=True))
        used = statistics.median(a + b for (_, a), (_, b) in answers) / cores
        rows.append((f"{width} wide, fastest step", fastest * 1e3, 1.0, fastest / used))
        for name, shape in shapes.items():
            predicted = planned(width, shape)[1].predicted_step_seconds
            rows.append((f"  {name}", predicted * 1e3, predicted / fastest, predicted / used))
    table(("", "ms a step", "÷ fastest", "÷ processor"), rows)


if __name__ == "__main__":
    main()
