"""The process group of the workers: JAX's coordination service, and a transport of arrays.

`Peer` is the base class of worker objects that can form a group, and `init_process_group` is the
driver's side. This module imports JAX.

Neither JAX's coordination service nor its transfer server checks who connects. So on one machine
the service listens on a UNIX socket in a folder that no other user can enter, and which is removed
once all workers are connected; between machines it listens at one address. The transfer server
always listens at one address, and arrays are pulled by keys that are counted from a random number
of 62 bits.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from urllib.parse import quote

import jax

from launcher.cluster.ray import scratch
from launcher.cluster.ray.worker import WorkerHandle, gather
from launcher.runtime import PermuteTransport, PullTransport, Transport, keep_compiled
from launcher.runtime.compat import bind_collectives

_KEY_BITS = 62  # of a key's 64, so that there is room to count

_log = logging.getLogger(__name__)


class Peer:
    """A worker object that can be one of several.

    The driver calls `coordinator`, `join` and `connect`, in this order. Sockets are bound to the
    machine's `address` among the others, the loopback if all are on one machine.
    """

    def __init__(self) -> None:
        keep_compiled()
        self._transport: Transport | None = None
        self._folder: scratch.Scratch | None = None

    def about(self) -> tuple[int, list[int]]:
        """Return this process's number on its machine, and those of its devices in the group."""
        return os.getpid(), [i for i, d in enumerate(jax.devices()) if d in jax.local_devices()]

    def coordinator(self, address: str | None) -> str:
        """Return an address for JAX's coordination service.

        Args:
            address: the address of this host, at which a free port is chosen; None if all workers
                are on this machine, which then use a UNIX socket.
        """
        if address is None:
            self._folder = scratch.create()
            return f"unix:{quote(str(self._folder.path))}/jax"
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"{address}:{probe.getsockname()[1]}"

    def join(
        self, coordinator: str, count: int, index: int, address: str, transport: str
    ) -> str | None:
        """Become one process of the group.

        Args:
            coordinator: the address of the coordination service.
            count: the number of processes.
            index: the index of this process among them.
            address: the address of this process's host.
            transport: "pull", "collective", or "auto": pull between CPUs, collectives between GPUs.

        Returns:
            The address from which the others can pull arrays, or None if collectives move them.
        """
        bind_collectives(address)
        jax.distributed.initialize(coordinator, count, index, coordinator_bind_address=coordinator)
        if transport == "auto":
            transport = "pull" if jax.local_devices()[0].platform == "cpu" else "collective"
        _log.info(f"arrays go between processes by cluster.transport={transport}")
        if transport == "collective":
            self._transport = PermuteTransport()
            return None
        self._transport = PullTransport(address)
        return self._transport.address

    def connect(self, addresses: list[str | None], first_key: int = 0) -> None:
        """Connect to every worker that arrays are pulled from, once all have joined.

        Args:
            addresses: what `join` returned in each process, in their order.
            first_key: the first key to pull by, the same in all processes.
        """
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
    """Connect workers whose classes derive from `Peer`; it has to be the first call they get.

    Args:
        handles: the workers, in the order of their hosts.
        watch: watches the waits, as in `gather`.
        transport: see `Peer.join`.

    Raises:
        WorkerError: one of them cannot be reached.
    """
    if len(handles) == 1:
        return
    count, first = len(handles), handles[0]
    spread = len({handle.address for handle in handles}) > 1
    (coordinator,) = gather([first.submit("coordinator", first.address if spread else None)], watch)
    joining = [h.submit("join", coordinator, count, h.host, h.address, transport) for h in handles]
    addresses, first_key = gather(joining, watch), secrets.randbits(_KEY_BITS)
    gather([h.submit("connect", addresses, first_key) for h in handles], watch)
