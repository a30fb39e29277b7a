"""An array there and back between two processes, by each of `cluster.transport`.

    python tests/benchmarks/transports.py

`pull` are sockets, `collective` a compiled `jax.lax.ppermute` (by gloo on CPUs).
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from turns import Player, free_address, joined, serve, table, turn

SIZES = 4 << 10, 64 << 10, 1 << 20, 16 << 20  # bytes
WAYS = "pull", "collective"
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--role", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        play(int(args.role[0]), args.role[1], args.rounds)
        return
    words, address = ("--rounds", str(args.rounds), "--role"), free_address()
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    players = [Player(*words, str(i), address, env=env) for i in range(2)]
    try:
        for player in players:
            player.answer()
        rows = [
            (way, *(f"{1e3 * turn(players, f'{way} {size}')[0]:.3f}" for size in SIZES))
            for way in WAYS
        ]
        table(("ms one way", *(f"{size >> 10} KiB" for size in SIZES)), rows)
    finally:
        for player in players:
            player.process.kill()


def play(index: int, address: str, rounds: int) -> None:
    """One process: half the median of the seconds there and back, by way and size."""
    import jax
    import numpy as np

    from launcher.runtime import PermuteTransport
    from launcher.runtime.transport.transport import Parcel

    ways = {"pull": joined(address, index), "collective": PermuteTransport()}

    def timed(words: str) -> float:
        way, size = words.split()
        transport, count = ways[way], int(size) // 4
        ends, kind = jax.devices(), ((count,), np.dtype("float32"))
        there, back = (transport.bind([Parcel(*pair, *kind)]) for pair in (ends, ends[::-1]))
        transport.open([there, back], "")

        def there_and_back(array: Any) -> Any:
            arrived = there(transport.reserve(1), {} if index else {0: array})
            again = back(transport.reserve(1), arrived)
            return (arrived if index else again)[0]

        array, seconds = jax.device_put(np.ones(count, np.float32), jax.local_devices()[0]), []
        for _ in range(WARM_UP + rounds):
            start = time.perf_counter()
            array = jax.block_until_ready(there_and_back(array))
            seconds.append(time.perf_counter() - start)
        assert float(array[-1]) == 1
        return statistics.median(seconds[WARM_UP:]) / 2

    serve(timed)


if __name__ == "__main__":
    main()
