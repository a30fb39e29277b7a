"""A pipeline of two stages in two processes of one core each, beside the ideal.

    python tests/benchmarks/two_processes.py

Two workers on a core each run the pipeline together, by turns with arrays that are pulled and with
collectives (`cluster.transport`); two more processes run the same step serially on the first core.
They take turns, so that all see the same load. The ideal is the best serial time (the whole batch,
or a scan over microbatches) / 2 x (1 + (S - 1) / M): what two cores would need if nothing but the
pipeline's own bubble stood in their way. Processor time is hardly changed by other load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

from turns import Player, free_address, in_turns, joined, ratio, serve, table, turn

STAGES = 2
WAYS = "pull", "collective"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="hidden 16, sequence 8")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--schedule", default="eager_1f1b")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="a round's, sent without waiting")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role is not None:
        play(args)
        return
    cores = sorted(os.sched_getaffinity(0))[:STAGES]
    if len(cores) < STAGES:
        sys.exit(f"this needs {STAGES} cores; here is {len(cores)}")
    roles = {"whole": cores[0], "scan": cores[0], "0": cores[0], "1": cores[1]}
    words = *sys.argv[1:], "--address", free_address()
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    players = {
        role: Player(*words, "--role", role, env=env, cores={core}) for role, core in roles.items()
    }
    stages = [players["0"], players["1"]]
    try:
        for player in players.values():
            player.answer()
        calls = {
            "whole": lambda: turn([players["whole"]]),
            "scan": lambda: turn([players["scan"]]),
            **{way: lambda way=way: turn(stages, way) for way in WAYS},
        }
        report(in_turns(calls, args.rounds), 1 + (STAGES - 1) / args.micro_batches)
    finally:
        for player in players.values():
            player.process.kill()


def report(rounds: dict[str, list[Any]], bubble: float) -> None:
    """Print the medians; each round is set against its own best serial time."""
    parts = ("taken", "sent", "busy")
    found = {
        name: {part: [max(x[i] for x in each) for each in answers] for i, part in enumerate(parts)}
        for name, answers in rounds.items()
    }
    serial = {
        part: [min(p) for p in zip(*(found[n][part] for n in ("whole", "scan")), strict=True)]
        for part in parts
    }
    middle = {n: statistics.median(found[n]["taken"]) for n in ("whole", "scan")}
    print(f"ideal: {min(middle.values()) / STAGES * bubble * 1e3:.1f} ms a step")
    ideal = [seconds / STAGES * bubble for seconds in serial["taken"]]
    heads = ("", "ms a step", "÷ ideal", "best ÷ best", "ms to send", "CPU ÷ serial", "loss")
    rows = [
        (
            name,
            statistics.median(of["taken"]) * 1e3,
            ratio(of["taken"], ideal),
            min(of["taken"]) / min(ideal),
            statistics.median(of["sent"]) * 1e3,
            ratio([sum(x[2] for x in each) for each in rounds[name]], serial["busy"]),
            f"{rounds[name][-1][-1][3]:.5f}",
        )
        for name, of in found.items()
    ]
    table(heads, rows)


def play(args: argparse.Namespace) -> None:
    """Play one role: set up, then run some steps for each line."""
    import jax
    from contest import SIZES, TINY, Contest

    model = Contest(TINY if args.tiny else SIZES)
    if args.role in ("0", "1"):
        runs = pipelines(args, model)
    else:
        whole = model.step(jax.value_and_grad)
        fun = whole if args.role == "whole" else model.scanned(args.micro_batches)
        state = jax.jit(model.init)(jax.random.key(0))
        run = jax.jit(fun, donate_argnums=0).lower(state, model.batch).compile()
        runs = {"go": (run, state)}

    def steps(way: str) -> tuple[float, ...]:
        run, state = runs.pop(way)
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(args.steps):
            state, loss = run(state, model.batch)
        sent = time.perf_counter() - start
        leaves = jax.tree.leaves((state, loss))
        jax.block_until_ready([x for x in leaves if x.addressable_shards])
        taken, busy = time.perf_counter() - start, time.process_time() - busy
        runs[way] = run, state
        value = float(loss.addressable_data(0)) if loss.addressable_shards else 0.0
        return taken / args.steps, sent / args.steps, busy / args.steps, value

    serve(steps)


def pipelines(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """This process's part of the pipeline and of its state, by each transport."""
    import jax

    import launcher
    from launcher.plan import local_shape
    from launcher.plan.methods import PipeshardParallel, UniformStageOption
    from launcher.runtime import PermuteTransport, compile_step
    from launcher.trace import trace_step

    pull = joined(args.address, int(args.role), STAGES)
    step = model.step(launcher.value_and_grad)
    traced = trace_step(step, (jax.eval_shape(model.init, jax.random.key(0)), model.batch))
    stages = UniformStageOption(STAGES)
    method = PipeshardParallel(args.micro_batches, stage_option=stages, schedule=args.schedule)
    plan = method.plan(traced, local_shape(STAGES, STAGES, "cpu"))
    runs = {}
    for way, transport in zip(WAYS, (pull, PermuteTransport()), strict=True):
        executable = compile_step(traced, plan, jax.devices(), transport)
        runs[way] = executable, executable.create(model.init, jax.random.key(0))
    return runs


if __name__ == "__main__":
    main()
