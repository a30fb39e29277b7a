"""An array there and back between two processes, by each way that there is.

    python tests/benchmarks/transports.py

`pull` and `collective` are `cluster.transport`'s: sockets, and a compiled `jax.lax.ppermute` (by
gloo on CPUs). `device_put` is JAX's own copy to another process's device. With the JAX that the
project is tested with that is for GPUs alone: CPU devices raise a ValueError, printed in its place.
What the error advises (`jax_cross_host_transfer_socket_address`) ends it, but nothing ever arrives.
So the collective transport is the `ppermute`.
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
SIZES = 4 << 10, 64 << 10, 1 << 20, 16 << 20  # bytes
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--role", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role is not None:
        play(args)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    again = [sys.executable, __file__, "--rounds", str(args.rounds), "--coordinator", coordinator]
    players = [
        subprocess.Popen([*again, "--role", str(i)], env={**os.environ, **ENVIRONMENT})
        for i in range(2)
    ]
    try:
        sys.exit(max(abs(player.wait()) for player in players))
    finally:
        for player in players:
            player.kill()


def play(args: argparse.Namespace) -> None:
    """Send with the other process; the first one prints."""
    import jax
    from jax._src import distributed  # the key-value store

    from launcher.runtime import PermuteTransport, PullTransport

    jax.distributed.initialize(args.coordinator, 2, args.role)
    store = distributed.global_state.client
    pull = PullTransport()
    store.key_value_set(f"address_{args.role}", pull.address)
    pull.connect([store.blocking_key_value_get(f"address_{i}", 60_000) for i in range(2)])
    permute = PermuteTransport()
    ways = {
        "pull": lambda size: by(pull, size),
        "collective": lambda size: by(permute, size),
        "device_put": put,
    }
    say = print if args.role == 0 else lambda *_: None
    say(f"{'ms one way':12}" + "".join(f"{size >> 10:>9} KiB" for size in SIZES))
    for name, way in ways.items():
        try:
            taken = [timed(way(size), size, args.rounds) for size in SIZES]
        except ValueError as error:
            say(f"{name:12} ValueError: {error}")
        else:
            say(f"{name:12}" + "".join(f"{1e3 * each:13.3f}" for each in taken))
    jax.distributed.shutdown()


def timed(there_and_back, size, rounds):
    """Half the median of the seconds there and back."""
    import jax
    import numpy as np

    mine, found = jax.local_devices()[0], []
    array = jax.device_put(np.ones(size // 4, np.float32), mine)
    for _ in range(WARM_UP + rounds):
        start = time.perf_counter()
        array = jax.block_until_ready(there_and_back(array))
        found.append(time.perf_counter() - start)
    assert float(array[-1]) == 1
    return statistics.median(found[WARM_UP:]) / 2


def by(transport, size):
    """By a transport of ours."""
    import jax
    import numpy as np

    from launcher.runtime.transport.transport import Parcel

    ends = jax.devices()
    kind = (size // 4,), np.dtype("float32")
    there, back = (transport.bind([Parcel(*way, *kind)]) for way in (ends, ends[::-1]))
    transport.open([there, back], "")
    is_first = jax.process_index() == 0

    def there_and_back(array):
        arrived = there(transport.reserve(1), {0: array} if is_first else {})
        again = back(transport.reserve(1), arrived)
        return (again if is_first else arrived)[0]

    return there_and_back


def put(size):
    """By `jax.device_put`, from the one device to the other and back."""
    import jax
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    first, second = map(SingleDeviceSharding, jax.devices())

    def there_and_back(array):
        mine = [array] if jax.process_index() == 0 else []
        sent = jax.make_array_from_single_device_arrays((size // 4,), first, mine, dtype=np.float32)
        arrived = jax.device_put(sent, second)
        again = jax.device_put(arrived, first)
        return (again if mine else arrived).addressable_data(0)

    return there_and_back


if __name__ == "__main__":
    main()
