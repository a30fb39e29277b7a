"""Predicted beside measured steps of data parallelism in two processes, after a calibration.

    python tests/benchmarks/predicted_data.py [--rounds 8] [--widths 512 2048]

MLPs of four layers as wide as asked, Adam, two processes of one device each, as `cluster=emulated
cluster.hosts=2 parallel=data` runs them. The calibration is made anew (no cache is read or written)
before the rounds and after them; in between the sizes take turns, a few steps each. Printed are the
fastest and the median step, the predictions by nominal and by both calibrated rates, their ratios
to the fastest step and to the processor time of a step, which other load changes less, and where
the fastest recorded step went beside where the prediction says that it goes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

SETTINGS = (
    *("model=mlp", "model.num_layers=4", "dataset=synthetic", "train.global_batch_size=256"),
    *("optimizer=adam", "parallel=data", "parallel.num_micro_batches=1"),
    *("cluster=emulated", "cluster.gpus=2", "cluster.hosts=2"),
)


class Round(NamedTuple):
    """Some steps: their seconds, a recorded one's parts, processor seconds a step, of both."""

    seconds: list[float]
    parts: list[float]
    processor: float


PARTS = "passes", "sums after them", "update"


def settings(width: int) -> list[str]:
    sizes = ("input", "hidden", "output")
    return [*SETTINGS, *(f"model.{size}_size={width}" for size in sizes)]


def planned(width: int, shape: Any) -> tuple[Any, Any]:
    from launcher.config.compose import load
    from launcher.driver.planning.plan_from_config import plan_of
    from launcher.train.program import build_program

    config = load(settings(width))
    program = build_program(config)
    return program, plan_of(config.parallel, program.train, shape)


def play(index: int, address: str, widths: list[int], steps: int) -> None:
    """One process: some steps of a width for each line of input; the seconds of each, and parts."""
    import jax

    jax.distributed.initialize(address, 2, index)
    from jax._src import distributed  # the key-value store: a benchmark needs no driver

    from launcher.plan import local_shape
    from launcher.runtime import PullTransport, compile_step

    store, transport = distributed.global_state.client, PullTransport()
    store.key_value_set(f"address_{index}", transport.address)
    transport.connect([store.blocking_key_value_get(f"address_{i}", 60_000) for i in range(2)])
    held: dict[int, list[Any]] = {}
    for width in widths:
        program, plan = planned(width, local_shape(2, 2, "cpu"))
        run = compile_step(program.train, plan, jax.devices(), transport)
        held[width] = [run, run.create(program.init, program.seed), program.dataset.train(0)]
    print("ready", flush=True)
    for line in sys.stdin:
        of = held[int(line)]
        run, _, batch = of
        seconds, used = [], time.process_time()
        for _ in range(steps):
            began = time.perf_counter()
            of[1], metrics = run(of[1], batch)
            jax.block_until_ready((of[1], metrics))
            seconds.append(time.perf_counter() - began)
        used = (time.process_time() - used) / steps
        (of[1], _), read = run.record(of[1], batch)
        print(json.dumps((seconds, parts_of(read()), used)), flush=True)


def parts_of(spans: list[Any]) -> list[float]:
    """Seconds of a recorded step: its passes, the sums after them, and the update."""
    passes, update, *_ = (
        [s for s in spans if s.kind == kind] for kind in ("forward_backward", "update")
    )
    begun, over = min(s.start for s in passes), max(s.end for s in passes)
    first = min(s.start for s in update)
    return [(over - begun) / 1e9, (first - over) / 1e9, sum(s.end - s.start for s in update) / 1e9]


def predicted_parts(plan: Any) -> list[float]:
    (stage,) = plan.stages
    passes = stage.forward_seconds + stage.backward_seconds
    return [passes, 0.0, stage.update_seconds]


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
        os.environ |= {"JAX_PLATFORMS": "cpu", "LAUNCHER_CACHE_DIR": cache, "XDG_CACHE_HOME": cache}
        compare(args)


def compare(args: argparse.Namespace) -> None:
    from launcher.cluster.devices import emulated_pool
    from launcher.cluster.measure import measure_links
    from launcher.cluster.ray.session import worker_environment
    from launcher.config.cluster import Emulated
    from launcher.plan import local_shape
    from launcher.plan.profile.calibration import HostLinks, measure

    nominal, pool = local_shape(2, 2, "cpu"), emulated_pool(Emulated(gpus=2, hosts=2))

    def calibrated() -> Any:
        return HostLinks(measure_links(pool)).applied(measure(nominal)[0].applied(nominal))

    shapes = {"nominal": nominal, "calibrated before": calibrated()}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = [f"--steps={args.steps}", "--widths", *map(str, args.widths)]
    peers = [
        subprocess.Popen(
            [sys.executable, __file__, *flags, "--role", str(i), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=worker_environment(os.environ, pool, i),
        )
        for i in range(2)
    ]
    found: dict[int, list[Round]] = {width: [] for width in args.widths}
    try:
        for peer in peers:
            while "ready" not in answer(peer):
                pass
        for number in range(args.rounds + 1):
            for width in args.widths:
                for peer in peers:
                    print(width, file=peer.stdin, flush=True)
                told = [json.loads(answer(peer)) for peer in peers]
                if number:  # the first round warms up
                    slowest = [max(each) for each in zip(*(of[0] for of in told), strict=True)]
                    found[width].append(Round(slowest, told[0][1], sum(of[2] for of in told)))
    finally:
        for peer in peers:
            peer.kill()
    shapes["calibrated after"] = calibrated()
    print(f"load {os.getloadavg()[0]:.1f}")
    for width in args.widths:
        show(width, found[width], shapes)


def show(width: int, found: list[Round], shapes: dict[str, Any]) -> None:
    steps = [seconds for of in found for seconds in of.seconds]
    fastest, median = min(steps), statistics.median(steps)
    cores = len(os.sched_getaffinity(0))
    used = statistics.median(of.processor for of in found) / cores
    print(
        f"\n{width} wide: fastest step {fastest * 1e3:.1f} ms, median {median * 1e3:.1f} ms; "
        f"processor time of a step, over {cores} cores: {used * 1e3:.1f} ms"
    )
    parts = min((of.parts for of in found), key=sum)
    print(f"{'recorded':18} {'':24} {as_parts(parts)}")
    for name, shape in shapes.items():
        plan = planned(width, shape)[1]
        predicted = plan.predicted_step_seconds
        print(
            f"{name:18} {predicted * 1e3:8.1f} ms, ÷ fastest {predicted / fastest:4.2f}, "
            f"÷ processor {predicted / used:4.2f}  {as_parts(predicted_parts(plan))}"
        )


def as_parts(parts: list[float]) -> str:
    return ", ".join(f"{name} {s * 1e3:.1f}" for name, s in zip(PARTS, parts, strict=True) if s)


def answer(peer: subprocess.Popen[str]) -> str:
    while (line := peer.stdout.readline()).startswith("[Gloo]"):
        pass
    if not line:
        sys.exit("a process ended")
    return line


if __name__ == "__main__":
    main()
