"""How worker processes become one: they find one another, and can pull arrays from one another.

`Peer` is the part of a worker object that does it, `introduce` the driver's side. Loads JAX; what
runs in workers derives from it, and whoever starts such workers calls `introduce`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import jax

from launcher.cluster.handle import WorkerHandle, gather
from launcher.runtime import PullTransport


class Peer:
    """A worker object that may be one of several: `coordinator`, `join`, `connect`, in this order.

    What it opens, it opens at its machine's `address` among the others, which on one machine is
    the loopback, that nobody else can reach.
    """

    def __init__(self) -> None:
        self._transport: PullTransport | None = None

    def coordinator(self, address: str) -> str:
        """Where the workers can find one another: at this host's `address`, a port free now."""
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"{address}:{probe.getsockname()[1]}"

    def join(self, coordinator: str, count: int, index: int, address: str) -> str:
        """Become process `index` of `count`, on a host of this `address`. Returns where the
        others can pull arrays from."""
        jax.distributed.initialize(coordinator, count, index, coordinator_bind_address=coordinator)
        self._transport = PullTransport(address)
        return self._transport.address

    def connect(self, addresses: list[str]) -> None:
        """Connect to every worker, `addresses` in their order."""
        assert self._transport is not None
        self._transport.connect(addresses)


def introduce(
    handles: Sequence[WorkerHandle], watch: Callable[[list[WorkerHandle]], None] | None = None
) -> None:
    """Make workers of classes derived from `Peer` know one another; the first call they get.
    `watch` looks after the waits, as in `gather`.

    Raises WorkerError where one of them cannot be reached.
    """
    if len(handles) == 1:
        return
    count, first = len(handles), handles[0]
    (coordinator,) = gather([first.submit("coordinator", first.address)], watch)
    joining = [h.submit("join", coordinator, count, h.host, h.address) for h in handles]
    addresses = gather(joining, watch)
    gather([h.submit("connect", addresses) for h in handles], watch)
