"""Data parallelism in one and in two processes of a core each, beside PyTorch's.

    python tests/benchmarks/data_parallel.py                   # ours, by the size of the buckets
    python tests/benchmarks/data_parallel.py --torch PYTHON    # and PyTorch's, if PYTHON has it

An MLP 512-2048-512-2048-512 is trained with Adam on batches of 512 rows; two processes have half of
the rows each. `servers` are two processes as well, whose gradients two parameter servers sum. All
take turns, a few steps each, so that they see the same load; a ratio is the median over the rounds,
each against the same round's `ours, 1 process`, or `ours, 2 processes`. PyTorch is the
`DistributedDataParallel` of its tutorial, over gloo.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

WIDTHS = (512, 2048, 512, 2048, 512)
ROWS = 512
BUCKETS = {"25 MiB": 25 << 20, "4 MiB": 4 << 20, "one": 1 << 40}


@dataclass(frozen=True)
class Player:
    """What takes turns: a framework in some processes.

    Attributes:
        framework: "ours", "servers" or "torch".
        processes: number of processes.
        buckets: a name of `BUCKETS`.
    """

    framework: str
    processes: int
    buckets: str = "25 MiB"

    @property
    def name(self) -> str:
        """The name in the table."""
        several = f", buckets {self.buckets}" if self.processes > 1 else ""
        return f"{self.framework}, {self.processes} process{'es' * (self.processes > 1)}{several}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", help="a Python that has PyTorch")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5, help="a round's, sent without waiting")
    parser.add_argument("--role", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        framework, index, count, rest = args.role
        address, _, buckets = rest.partition("/")
        make = {"ours": our_step, "servers": served_step, "torch": torch_step}[framework]
        play(make(int(index), int(count), address, BUCKETS[buckets]), args.steps)
        return
    listed = [Player("ours", 1), *(Player("ours", 2, buckets) for buckets in BUCKETS)]
    listed += [Player("servers", 2, buckets) for buckets in ("25 MiB", "4 MiB")]
    if args.torch:
        listed += [Player("torch", 1), Player("torch", 2)]
    contest(args, listed)


def contest(args: argparse.Namespace, listed: Sequence[Player]) -> None:
    """Let the players take turns, and print the medians."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("this needs 2 cores")
    running = {player: start(player, cores, args) for player in listed}
    try:
        first = {player: max(told(one)[0] for one in running[player]) for player in listed}
        taken: dict[Player, list[float]] = {player: [] for player in listed}
        losses = {}
        for k in range(args.rounds + 1):
            for player in listed:
                for one in running[player]:
                    print("go", file=one.stdin, flush=True)
                answers = [told(one) for one in running[player]]
                losses[player] = answers[0][1]
                if k:  # the first round warms up
                    taken[player].append(max(seconds for seconds, _ in answers))
    finally:
        for one in (one for group in running.values() for one in group):
            one.kill()
    heads = ("ms a step", "÷ ours, 1", "÷ ours, 2", "s to first step", "loss")
    print(f"{'':36}" + "".join(f"{head:>{len(head) + 2}}" for head in heads))
    for player in listed:
        one, two = (
            statistics.median(a / b for a, b in zip(taken[player], taken[other], strict=True))
            for other in listed[:2]
        )
        print(
            f"{player.name:36}{statistics.median(taken[player]) * 1e3:11.1f}{one:11.2f}{two:11.2f}"
            f"{first[player]:17.1f}{losses[player]:8.4f}"
        )


def start(
    player: Player, cores: Sequence[int], args: argparse.Namespace
) -> list[subprocess.Popen[str]]:
    """The processes of a player, each on a core; `servers` has one, which starts the others."""
    is_driver = player.framework == "servers"
    places = [set(cores)] if is_driver else [{core} for core in cores[: player.processes]]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    python = args.torch if player.framework == "torch" else sys.executable
    roles = [
        [player.framework, str(i), str(player.processes), f"{address}/{player.buckets}"]
        for i in range(len(places))
    ]
    return [
        subprocess.Popen(
            [python, __file__, f"--steps={args.steps}", "--role", *role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "XLA_FLAGS": ""},
            preexec_fn=lambda place=place: os.sched_setaffinity(0, place),
        )
        for role, place in zip(roles, places, strict=True)
    ]


def told(one: subprocess.Popen[str]) -> list[float]:
    """The numbers that a process has answered."""
    while (line := one.stdout.readline()).startswith("[Gloo]"):
        pass
    if not line:
        sys.exit("a process ended")
    return [float(word) for word in line.split()]


def play(train: Callable[[int], float], steps: int) -> None:
    """Run one step, then some each time a line comes in; print seconds a step and the loss."""
    train(1)
    print(time.clock_gettime(time.CLOCK_MONOTONIC) - _began(), 0.0, flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        loss = train(steps)
        print((time.perf_counter() - began) / steps, loss, flush=True)


def _began() -> float:
    """When this process began, in seconds since the machine did."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def our_step(index: int, count: int, address: str, bucket_bytes: int) -> Callable[[int], float]:
    """Ours: `parallel=data` over all processes, as the training workers run it."""
    import jax

    from launcher.plan.methods import DataParallel
    from launcher.runtime import PullTransport

    transport = None
    if count > 1:
        from jax._src import distributed  # the key-value store

        jax.distributed.initialize(address, count, index)
        store, transport = distributed.global_state.client, PullTransport()
        store.key_value_set(f"address_{index}", transport.address)
        peers = [store.blocking_key_value_get(f"address_{i}", 60_000) for i in range(count)]
        transport.connect(peers)
    return training(DataParallel(bucket_bytes=bucket_bytes), count, transport)


def served_step(index: int, count: int, address: str, bucket_bytes: int) -> Callable[[int], float]:
    """Ours: `parallel=parameter_server`, of which this process is the driver."""
    del index, address
    from launcher.cluster.devices import EMULATED, DevicePool
    from launcher.cluster.process_group import Peer
    from launcher.cluster.ray.private_ray import PrivateRay
    from launcher.cluster.worker_group import WorkerGroup
    from launcher.plan.methods import ParameterServer

    class Served(Peer):
        def train(self, steps: int) -> float:
            if not hasattr(self, "made"):
                cores = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(0, {cores[self._servers.rank]})
                method = ParameterServer(bucket_bytes=bucket_bytes)
                self.made = training(method, count, servers=self._servers)
            return self.made(steps)

    session = PrivateRay(DevicePool("cpu", count, 1, EMULATED, ""), None)
    group = WorkerGroup(session.spawn(Served), session.check, 600.0, "")
    group.use_servers(session.serve(count, count))
    return lambda steps: group.gather(group.call("train", steps))[0]


def training(
    method: Any, count: int, transport: Any = None, servers: Any = None
) -> Callable[[int], float]:
    """A function that trains so many steps with all of `count` processes and returns the loss."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import launcher
    from launcher.plan import local_shape
    from launcher.runtime import compile_step
    from launcher.trace import trace_step

    optimizer = optax.adam(1e-3)

    def init(key):
        pairs = list(itertools.pairwise(WIDTHS))
        params = [
            {"w": jax.random.normal(k, pair) / pair[0] ** 0.5, "b": jnp.zeros(pair[1])}
            for k, pair in zip(jax.random.split(key, len(pairs)), pairs, strict=True)
        ]
        return params, optimizer.init(params)

    def step(state, batch):
        def loss(params):
            x = batch["x"]
            for layer in params[:-1]:
                x = jax.nn.relu(x @ layer["w"] + layer["b"])
            x = x @ params[-1]["w"] + params[-1]["b"]
            return jnp.mean((x - batch["y"]) ** 2)

        params, moments = state
        value, grads = launcher.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    rng = np.random.default_rng(0)
    batch = {
        "x": rng.standard_normal((ROWS, WIDTHS[0]), np.float32),
        "y": rng.standard_normal((ROWS, WIDTHS[-1]), np.float32),
    }
    traced = trace_step(step, (jax.eval_shape(init, jax.random.key(0)), batch))
    plan = method.plan(traced, local_shape(count, count, "cpu"))
    run = compile_step(traced, plan, jax.devices(), transport, servers)
    state = run.create(init, jax.random.key(0))

    def train(steps: int) -> float:
        nonlocal state
        for _ in range(steps):
            state, loss = run(state, batch)
        jax.block_until_ready((state, loss))
        return float(loss.addressable_data(0))

    return train


def torch_step(index: int, count: int, address: str, bucket_bytes: int) -> Callable[[int], float]:
    """PyTorch's DistributedDataParallel, each process with its share of the rows."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    pairs = list(itertools.pairwise(WIDTHS))
    layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())][:-1]
    model = nn.Sequential(*layers)
    if count > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://{address}", rank=index, world_size=count
        )
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_bytes / 2**20)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    rows = ROWS // count
    x, y = torch.randn(ROWS, WIDTHS[0]), torch.randn(ROWS, WIDTHS[-1])
    x, y = (each[index * rows : (index + 1) * rows] for each in (x, y))

    def train(steps: int) -> float:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        return loss.item()

    return train


if __name__ == "__main__":
    main()
