"""A pipeline of two stages in two processes of one core each, beside the ideal.

    python tests/benchmarks/two_processes.py

Two workers on a core each run the pipeline together, by turns with arrays that are pulled and with
collectives (`cluster.transport`); two more processes run the same step serially on the first core.
They take turns, so that all see the same load. The ideal
is the best serial time (the whole batch, or a scan over microbatches) / 2 x (1 + (S - 1) / M): what
two cores would need if nothing but the pipeline's own bubble stood in their way.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
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
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role is not None:
        play(args)
        return
    cores = sorted(os.sched_getaffinity(0))[:STAGES]
    if len(cores) < STAGES:
        sys.exit(f"this needs {STAGES} cores; here is {len(cores)}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    roles = {"whole": cores[0], "scan": cores[0], "0": cores[0], "1": cores[1]}
    players = {role: start(role, core, coordinator) for role, core in roles.items()}
    try:
        contest(args, players)
    finally:
        for player in players.values():
            player.kill()


def start(role: str, core: int, coordinator: str) -> subprocess.Popen[str]:
    """A process that plays a role on one core."""
    return subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--role", role, "--coordinator", coordinator],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )


def contest(args: argparse.Namespace, players: dict[str, subprocess.Popen[str]]) -> None:
    """Let them take turns, and print the medians."""

    def told(role: str) -> list[float]:
        while (line := players[role].stdout.readline()).startswith("[Gloo]"):
            pass
        if not line:
            sys.exit(f"the process {role} ended")
        return [float(word) for word in line.split()]

    def turn(*roles: str, say: str = "go") -> list[list[float]]:
        for role in roles:
            print(say, file=players[role].stdin, flush=True)
        return [told(role) for role in roles]

    for role in players:
        told(role)  # ready
    steps: dict[str, list[float]] = {name: [] for name in ("whole", "scan", *WAYS)}
    sent: dict[str, list[float]] = {way: [] for way in WAYS}
    busy: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    losses = {}
    for k in range(args.rounds + 1):
        rounds = {"whole": turn("whole"), "scan": turn("scan")}
        rounds |= {way: turn("0", "1", say=way) for way in WAYS}
        losses = {name: answers[-1][3] for name, answers in rounds.items()}
        if k:
            for name, answers in rounds.items():
                steps[name].append(max(taken for taken, *_ in answers))
            serial = min(rounds["whole"][0][2], rounds["scan"][0][2])
            for way in WAYS:
                sent[way].append(max(x[1] for x in rounds[way]))
                busy[way].append([serial, *(x[2] for x in rounds[way])])
    report(args, steps, sent, busy, losses)


def report(
    args: argparse.Namespace,
    steps: dict[str, list[float]],
    sent: dict[str, list[float]],
    busy: dict[str, list[list[float]]],
    losses: dict[str, float],
) -> None:
    """Print the medians. Wall time first; then the processor's time, which other load on the
    machine hardly changes."""
    bubble = 1 + (STAGES - 1) / args.micro_batches
    middle = {name: statistics.median(x) * 1e3 for name, x in steps.items()}
    ideal = min(middle["whole"], middle["scan"]) / STAGES * bubble
    for name, step in middle.items():
        print(f"{name:10} {step:9.1f} ms a step   loss {losses[name]:.5f}")
    print(f"ideal      {ideal:9.1f} ms a step")
    print(f"{'':24}" + "".join(f"{way:>12}" for way in WAYS))

    def line(name: str, values: list[float]) -> None:
        print(f"{name:24}" + "".join(f"{value:12.2f}" for value in values))

    # Of each round against its own serial times, so that a change of load cancels.
    serial = [
        min(pair) / STAGES * bubble for pair in zip(steps["whole"], steps["scan"], strict=True)
    ]
    ratios = [[t / best for t, best in zip(steps[way], serial, strict=True)] for way in WAYS]
    line("÷ ideal, median", [statistics.median(ratio) for ratio in ratios])
    line("÷ ideal, best ÷ best", [min(steps[way]) / min(serial) for way in WAYS])
    line("ms to send a step", [statistics.median(sent[way]) * 1e3 for way in WAYS])
    cpu = [[statistics.median(x) for x in zip(*busy[way], strict=True)] for way in WAYS]
    line("CPU time, sum ÷ serial", [sum(stages) / whole for whole, *stages in cpu])
    line("busiest ÷ half of serial", [max(stages) / (whole / STAGES) for whole, *stages in cpu])


def play(args: argparse.Namespace) -> None:
    """Play one role: set up, then run some steps each time a line comes in."""
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
    print(0, flush=True)
    for line in sys.stdin:
        run, state = runs.pop(line.strip())
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(args.steps):
            state, loss = run(state, model.batch)
        sent = time.perf_counter() - start
        leaves = jax.tree.leaves((state, loss))
        jax.block_until_ready([x for x in leaves if x.addressable_shards])
        taken, busy = time.perf_counter() - start, time.process_time() - busy
        runs[line.strip()] = run, state
        value = float(loss.addressable_data(0)) if loss.addressable_shards else 0.0
        print(taken / args.steps, sent / args.steps, busy / args.steps, value, flush=True)


def pipelines(args, model):
    """This process's part of the pipeline and of its state, by each transport."""
    import jax
    from jax._src import distributed  # the key-value store

    import launcher
    from launcher.plan import local_shape
    from launcher.plan.methods import PipeshardParallel, UniformStageOption
    from launcher.runtime import PermuteTransport, PullTransport, compile_step
    from launcher.trace import trace_step

    index = int(args.role)
    jax.distributed.initialize(args.coordinator, STAGES, index)
    store = distributed.global_state.client
    pull = PullTransport()
    store.key_value_set(f"address_{index}", pull.address)
    pull.connect([store.blocking_key_value_get(f"address_{i}", 60_000) for i in range(STAGES)])
    step = model.step(launcher.value_and_grad)
    traced = trace_step(step, (jax.eval_shape(model.init, jax.random.key(0)), model.batch))
    stages = UniformStageOption(STAGES)
    method = PipeshardParallel(args.micro_batches, stage_option=stages, schedule=args.schedule)
    plan = method.plan(traced, local_shape(STAGES, STAGES, "cpu"))
    found = {}
    for way, transport in zip(WAYS, (pull, PermuteTransport()), strict=True):
        executable = compile_step(traced, plan, jax.devices(), transport)
        found[way] = executable, executable.create(model.init, jax.random.key(0))
    return found


if __name__ == "__main__":
    main()
