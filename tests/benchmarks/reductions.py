"""Sums over two hosts of four emulated devices: by one all-reduce, or inside each host first.

    python tests/benchmarks/reductions.py

The hierarchical sum is a reduce-scatter inside a host, an all-reduce over the hosts, and an
all-gather. Both take turns, in the same two processes; a ratio is the median over the rounds. It is
why there is no setting for it: buckets are of megabytes.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

ROUNDS, COLD = 15, 3
KIBIBYTES = 64, 1024, 8192  # on each device


def main() -> None:
    if len(sys.argv) > 1:
        play(int(sys.argv[1]), sys.argv[2])
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=4"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": "5"}
    command = [sys.executable, __file__]
    peers = [subprocess.Popen([*command, str(i), address], env=env) for i in range(2)]
    sys.exit(max(peer.wait() for peer in peers))


def play(index: int, address: str) -> None:
    """One host; the first prints the figures."""
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
    summed = [
        jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=each, out_specs=each, check_vma=False))
        for fun in (flat, hierarchical)
    ]
    for size in KIBIBYTES:
        shape = (8 * size * 256,)
        x = jax.jit(lambda of=shape: jnp.ones(of), out_shardings=NamedSharding(mesh, each))()
        taken: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for of, durations in zip(summed, taken, strict=True):
                began = time.perf_counter()
                jax.block_until_ready(of(x))
                durations.append(time.perf_counter() - began)
        if index == 0:
            one, two = (statistics.median(durations[COLD:]) * 1e3 for durations in taken)
            pairs = zip(taken[1][COLD:], taken[0][COLD:], strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            print(
                f"{size:6} KiB: flat {one:6.1f} ms, hierarchical {two:6.1f} ms, {ratio:.2f} of it"
            )


if __name__ == "__main__":
    main()
