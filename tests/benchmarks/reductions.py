"""Sums over two hosts of four emulated devices: by one all-reduce, or inside each host first.

    python tests/benchmarks/reductions.py

The hierarchical sum is a reduce-scatter inside a host, an all-reduce over the hosts, and an
all-gather. Both take turns, in the same two processes. It is why there is no setting for it:
buckets are of megabytes.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from turns import Player, free_address, ratio, serve, table, turn

ROUNDS, COLD = 15, 3
KIBIBYTES = 64, 1024, 8192  # on each device


def main() -> None:
    if len(sys.argv) > 1:
        play(int(sys.argv[1]), sys.argv[2])
        return
    address = free_address()
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "NPROC": "5"}
    peers = [Player(str(i), address, env=env) for i in range(2)]
    try:
        for peer in peers:
            peer.answer()
        rows = []
        for size in KIBIBYTES:
            (flat, inside), _ = turn(peers, str(size))
            medians = (statistics.median(each) * 1e3 for each in (flat, inside))
            rows.append((f"{size} KiB", *medians, ratio(inside, flat)))
        table(("a device", "flat, ms", "hierarchical, ms", "ratio"), rows)
    finally:
        for peer in peers:
            peer.process.kill()


def play(index: int, address: str) -> None:
    """One host: the seconds of both sums, by their size."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    def flat(x: Any) -> Any:
        return jax.lax.psum(x, ("host", "device"))

    def hierarchical(x: Any) -> Any:
        part = jax.lax.psum_scatter(x, "device", scatter_dimension=0, tiled=True)
        return jax.lax.all_gather(jax.lax.psum(part, "host"), "device", axis=0, tiled=True)

    jax.distributed.initialize(address, 2, index)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("host", "device"))
    each = PartitionSpec(("host", "device"))
    sums = [
        jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=each, out_specs=each, check_vma=False))
        for fun in (flat, hierarchical)
    ]

    def timed(kibibytes: str) -> list[list[float]]:
        count = 8 * int(kibibytes) * 256
        x = jax.jit(lambda: jnp.ones(count), out_shardings=NamedSharding(mesh, each))()
        taken: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for fun, durations in zip(sums, taken, strict=True):
                began = time.perf_counter()
                jax.block_until_ready(fun(x))
                durations.append(time.perf_counter() - began)
        return [durations[COLD:] for durations in taken]

    serve(timed)


if __name__ == "__main__":
    main()
