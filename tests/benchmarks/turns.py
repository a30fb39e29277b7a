"""Processes and functions that take turns, so that other load falls on all; medians and tables."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def free_address() -> str:
    """Return an address of this machine at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Player:
    """This script in another process, with these arguments; it answers lines with JSON."""

    def __init__(
        self,
        *words: str,
        env: Mapping[str, str],
        cores: Collection[int] = (),
        python: str = sys.executable,
    ) -> None:
        self.process = subprocess.Popen(
            [python, sys.argv[0], *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )

    def answer(self) -> Any:
        """Return the next answer."""
        while not (line := self.process.stdout.readline()).startswith("answer "):  # type: ignore[union-attr]
            if not line:
                sys.exit(f"a process ended: {self.process.args}")
        return json.loads(line.removeprefix("answer "))


def turn(players: Iterable[Player], line: str = "go") -> list[Any]:
    """Let processes do their part at the same time, and return their answers."""
    players = list(players)
    for player in players:
        print(line, file=player.process.stdin, flush=True)
    return [player.answer() for player in players]


def serve(play: Callable[[str], Any], ready: Any = None) -> None:
    """Answer `ready`, and then each line with what `play` returns for it."""
    print("answer", json.dumps(ready), flush=True)
    for line in sys.stdin:
        print("answer", json.dumps(play(line.strip())), flush=True)


def joined(address: str, index: int, count: int = 2) -> Any:
    """Join the processes of JAX; return a transport that is connected to theirs."""
    import jax
    from jax._src import distributed  # the key-value store: a benchmark needs no driver

    from launcher.runtime import PullTransport

    jax.distributed.initialize(address, count, index)
    store, transport = distributed.global_state.client, PullTransport()
    store.key_value_set(f"address_{index}", transport.address)
    peers = [store.blocking_key_value_get(f"address_{i}", 60_000) for i in range(count)]
    transport.connect(peers)
    return transport


def in_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Call each function once a round; the first round warms up and does not count."""
    results: dict[str, list[Any]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            result = call()
            if number:
                results[name].append(result)
    return results


def ratio(these: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the rounds' ratios, from which a change of load cancels out."""
    return statistics.median(a / b for a, b in zip(these, others, strict=True))


def more(these: Sequence[float], others: Sequence[float]) -> str:
    """Return by how much these are more: the median of ratios and its 95 % interval."""
    import numpy as np  # here: few of those who take turns compare so
    from scipy.stats import bootstrap

    logs = np.log(these) - np.log(others)
    found = bootstrap((logs,), np.median, method="percentile", rng=0).confidence_interval
    middle, low, high = np.expm1([np.median(logs), *found])
    return f"{middle:+.2%} (95 %: {low:+.2%} to {high:+.2%})"


def run_launcher(*words: str, cache: Path | None = None) -> None:
    """Run `python -m launcher` in the checkout, with a cache folder of its own."""
    env = os.environ | ({"XDG_CACHE_HOME": str(cache)} if cache else {})
    command = [sys.executable, "-m", "launcher", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)


def worker_of(words: Sequence[str], devices: int) -> tuple[Any, Any, Any]:
    """Return a training worker in this process with its first state, its settings and its plan."""
    from launcher.config.compose import load, to_dict
    from launcher.driver.planning.plan_from_config import plan_of
    from launcher.plan import local_shape
    from launcher.train.program import build_program
    from launcher.train.worker import TrainWorker

    config, worker = load(words), TrainWorker()
    plan = plan_of(config.parallel, build_program(config).train, local_shape(devices, 1, "cpu"))
    worker.build(to_dict(config))
    worker.setup(plan.to_dict())
    worker.create()
    return worker, config, plan


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table, its first column to the left; and the machine's load."""
    cells = [heads, *([x if isinstance(x, str) else f"{x:,.2f}" for x in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        rest = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        print(f"{first:{widths[0]}}  " + "  ".join(rest))
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
