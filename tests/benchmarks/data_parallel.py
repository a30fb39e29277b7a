"""Data parallelism in one and in two processes of a core each, beside PyTorch's.

    python tests/benchmarks/data_parallel.py                   # ours, by the size of the buckets
    python tests/benchmarks/data_parallel.py --torch PYTHON    # and PyTorch's, if PYTHON has it
    python tests/benchmarks/data_parallel.py --one-core        # whether the second core pays

An MLP 512-2048-512-2048-512 is trained with Adam on batches of 512 rows; two processes have half of
the rows each. `servers` are two processes as well, whose gradients two parameter servers sum. All
take turns, a few steps each, so that they see the same load; a ratio is the median over the rounds,
each against the same round's `ours, 1 process`, or `ours, 2 processes`. PyTorch is the
`DistributedDataParallel` of its tutorial, over gloo.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from turns import Player, free_address, in_turns, joined, ratio, serve, table, turn

WIDTHS = (512, 2048, 512, 2048, 512)
ROWS = 512
BUCKETS = {"25 MiB": 25 << 20, "4 MiB": 4 << 20, "one": 1 << 40}
# Framework, processes, buckets.
OURS = [("ours", 1, "25 MiB"), *(("ours", 2, name) for name in BUCKETS)]
OURS += [("servers", 2, "25 MiB"), ("servers", 2, "4 MiB")]
TORCH = [("torch", 1, "25 MiB"), ("torch", 2, "25 MiB")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", help="a Python that has PyTorch")
    parser.add_argument("--one-core", action="store_true", help="ours alone, of one bucket size")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5, help="a round's, sent without waiting")
    parser.add_argument("--role", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        framework, index, count, address, buckets = args.role
        make = {"ours": our_step, "servers": served_step, "torch": torch_step}[framework]
        play(make(int(index), int(count), address, BUCKETS[buckets]), args.steps)
        return
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("this needs 2 cores")
    if args.torch is None and importlib.util.find_spec("torch"):
        args.torch = sys.executable
    contestants = (OURS[:2] if args.one_core else OURS) + (TORCH if args.torch else [])
    running = {", ".join(map(str, each)): started(args, *each) for each in contestants}
    try:
        for player in itertools.chain(*running.values()):
            player.answer()
        calls = {name: functools.partial(turn, players) for name, players in running.items()}
        rounds = in_turns(calls, args.rounds)
    finally:
        for player in itertools.chain(*running.values()):
            player.process.kill()
    taken = {name: [max(s for s, _ in each) for each in found] for name, found in rounds.items()}
    one, two = list(taken.values())[:2]
    table(
        ("framework, processes, buckets", "ms a step", "÷ the first", "÷ the second", "loss"),
        [
            (
                name,
                statistics.median(seconds) * 1e3,
                ratio(seconds, one),
                ratio(seconds, two),
                rounds[name][-1][0][1],
            )
            for name, seconds in taken.items()
        ],
    )


def started(args: argparse.Namespace, framework: str, count: int, buckets: str) -> list[Player]:
    """The processes of a contestant, each on a core; `servers` has one, which starts the others."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    places = [set(cores)] if framework == "servers" else [{core} for core in cores[:count]]
    address = free_address()
    return [
        Player(
            *(f"--steps={args.steps}", "--role", framework, str(i), str(count), address, buckets),
            env={"OMP_NUM_THREADS": "1", "XLA_FLAGS": ""},
            cores=place,
            python=args.torch if framework == "torch" else sys.executable,
        )
        for i, place in enumerate(places)
    ]


def play(train: Callable[[int], float], steps: int) -> None:
    """Run one step, then some for each line; answer seconds a step and the loss."""

    def timed(_: str) -> tuple[float, float]:
        began = time.perf_counter()
        loss = train(steps)
        return (time.perf_counter() - began) / steps, loss

    train(1)
    serve(timed)


def our_step(index: int, count: int, address: str, bucket_bytes: int) -> Callable[[int], float]:
    """Ours: `parallel=data` over all processes, as the training workers run it."""
    from launcher.base import keep_memory
    from launcher.plan.methods import DataParallel

    keep_memory()
    transport = joined(address, index, count) if count > 1 else None
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
            if not hasattr(self, "trained"):
                cores = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(0, {cores[self._servers.rank]})
                method = ParameterServer(bucket_bytes=bucket_bytes)
                self.trained = training(method, count, servers=self._servers)
            return self.trained(steps)

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
