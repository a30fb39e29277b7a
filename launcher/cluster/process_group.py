"""How worker processes become one: they find one another, and a way for arrays between them.

`Peer` is the part of a worker object that does it, `init_process_group` the driver's side. Loads
JAX; what runs in workers derives from it, and whoever starts such workers calls
`init_process_group`.

Neither JAX's coordination service nor its transfer server asks who calls. So on one machine the
service is a socket in a folder that nobody else can enter, gone once all workers are connected;
between machines it listens at one address. The server listens at one address in either case, and
what it offers is pulled by a number that starts at a random one of 62 bits.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from urllib.parse import quote

import jax

from launcher.cluster.ray import scratch
from launcher.cluster.ray.worker import WorkerHandle, gather
from launcher.runtime import PermuteTransport, PullTransport, Transport, keep_compiled
from launcher.runtime.compat import bind_collectives

_KEY_BITS = 62  # of the 64 that a key has: there is room to count


class Peer:
    """A worker object that may be one of several: `coordinator`, `join`, `connect`, in this order.

    What it opens, it opens at its machine's `address` among the others, which on one machine is
    the loopback.
    """

    def __init__(self) -> None:
        keep_compiled(say=print)
        self._transport: Transport | None = None
        self._folder: scratch.Scratch | None = None

    def coordinator(self, address: str | None) -> str:
        """Where the workers can find one another: at this host's `address`, a port free now; None:
        they are all on this machine."""
        if address is None:
            self._folder = scratch.create()
            return f"unix:{quote(str(self._folder.path))}/jax"
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"{address}:{probe.getsockname()[1]}"

    def join(
        self, coordinator: str, count: int, index: int, address: str, transport: str
    ) -> str | None:
        """Become process `index` of `count`, on a host of this `address`. Returns where the others
        can pull arrays from, if they do: by `transport` "pull", and by "auto" on CPUs; None where
        collectives move them."""
        bind_collectives(address)
        jax.distributed.initialize(coordinator, count, index, coordinator_bind_address=coordinator)
        if transport == "auto":
            transport = "pull" if jax.local_devices()[0].platform == "cpu" else "collective"
        print(f"arrays go between processes by cluster.transport={transport}")
        if transport == "collective":
            self._transport = PermuteTransport()
            return None
        self._transport = PullTransport(address)
        return self._transport.address

    def connect(self, addresses: list[str | None], first_key: int = 0) -> None:
        """Connect to every worker that arrays are pulled from, `addresses` in their order, and pull
        by keys from `first_key` on; all workers have joined."""
        if isinstance(self._transport, PullTransport):
            self._transport.connect([a for a in addresses if a is not None], first_key)
        if self._folder is not None:
            self._folder.remove()
            self._folder = None


def init_process_group(
    handles: Sequence[WorkerHandle],
    watch: Callable[[list[WorkerHandle]], None] | None = None,
    transport: str = "auto",
) -> None:
    """Make workers of classes derived from `Peer` know one another; the first call they get.
    `watch` looks after the waits, as in `gather`; `transport`: see `Peer.join`.

    Raises WorkerError where one of them cannot be reached.
    """
    if len(handles) == 1:
        return
    count, first = len(handles), handles[0]
    spread = len({handle.address for handle in handles}) > 1
    (coordinator,) = gather([first.submit("coordinator", first.address if spread else None)], watch)
    joining = [h.submit("join", coordinator, count, h.host, h.address, transport) for h in handles]
    addresses, first_key = gather(joining, watch), secrets.randbits(_KEY_BITS)
    gather([h.submit("connect", addresses, first_key) for h in handles], watch)
