"""The process group of the workers: JAX's coordination service, and a transport of arrays.

`Peer` is the base class of worker objects that can form a group; `WorkerGroup.join` is the driver's
side. In place of a group, workers that exchange nothing but sums have parameter servers;
each is then a JAX of its own. This module imports JAX.

Neither JAX's coordination service nor its transfer server authenticates its clients. So on one
machine the service, which the driver has, listens on a UNIX socket in a folder that no other user
can enter, and which is removed once all workers are connected; between machines it listens at one
address. The transfer server always listens at one address, and arrays are pulled by keys that are
counted from a random number of 62 bits.
"""

from __future__ import annotations

import os
import platform
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import numpy as np
import psutil

from launcher.base import DISTRIBUTION
from launcher.base.jax_compat import bind_collectives, coordination_service, join_processes
from launcher.cluster.ray import scratch
from launcher.cluster.ray.parameter_server import ServerClient
from launcher.cluster.ray.worker_actor import machine_id
from launcher.hardware import HostReport
from launcher.runtime import Transport, keep_compiled, make_transport

_PACKAGES = (DISTRIBUTION, "jax", "jaxlib", "flax", "optax", "numpy", "ray")
_SIDE = 4096, 256  # of the matrices: on GPUs, where each takes 64 MiB; on CPU devices
_ROUNDS = 20  # the first compiles
_SECONDS = 0.5  # after which no further round begins


class Peer:
    """A worker object that can be one of several.

    The driver calls `join` and `connect`, in this order, or `meet` alone. Sockets
    are bound to the machine's `address` among the others, the loopback if all are on one machine.
    """

    def __init__(self) -> None:
        keep_compiled()
        self._transport: Transport | None = None
        self._servers: ServerClient | None = None

    def process(self) -> int:
        """Return this process's number on its machine."""
        return os.getpid()

    def meet(
        self, count: int, index: int, servers: Sequence[tuple[Any, str]], seconds: float
    ) -> None:
        """Become one of `count` workers that exchange sums through parameter servers alone.

        Args:
            count: the number of workers.
            index: the index of this process among them.
            servers: Ray's handle and the name of each server.
            seconds: how long an exchange may take.
        """
        self._servers = ServerClient(index, count, servers, seconds)

    @property
    def _rank(self) -> int:
        """The index of this process among the workers."""
        return self._servers.rank if self._servers else jax.process_index()

    @property
    def _server_rank(self) -> int | None:
        """The same where parameter servers sum, so that each worker holds the others' state."""
        return self._servers.rank if self._servers else None

    def clock(self) -> int:
        """Return this host's clock, in nanoseconds since the epoch."""
        return time.time_ns()

    def measure_host(self, folder: str) -> HostReport:
        """Return this host's state, with each device's rates; it takes a second or a few.

        Args:
            folder: the run's folder.
        """
        rates = [_rates(device) for device in jax.local_devices()]
        versions, free = {"Python": platform.python_version()}, {}
        for name in _PACKAGES:
            with suppress(PackageNotFoundError):  # a checkout
                versions[name] = version(name)
        with suppress(OSError):  # no such driver
            driver = Path("/proc/driver/nvidia/version").read_text()
            versions["GPU driver"] = driver.splitlines()[0]
        for path in (folder, tempfile.gettempdir()):
            with suppress(OSError):  # another host's folder
                free[path] = psutil.disk_usage(path).free
        return HostReport(
            machine=machine_id(),
            versions=versions,
            free=free,
            amounts={
                "free memory": (float(psutil.virtual_memory().available),),
                "rate of matrix products": tuple(products for products, _ in rates),
                "rate of transfers to a device": tuple(transfers for _, transfers in rates),
            },
        )

    def join(
        self, coordinator: str, count: int, index: int, address: str, transport: str
    ) -> str | None:
        """Become one process of the group.

        Args:
            coordinator: the address of the coordination service.
            count: the number of processes.
            index: the index of this process among them.
            address: the address of this process's host.
            transport: the name of the transport, as of `make_transport`.

        Returns:
            The address from which the others get arrays; None if the transport needs none.
        """
        bind_collectives(address)
        join_processes(coordinator, count, index)
        self._transport = make_transport(transport, address)
        return self._transport.address

    def connect(self, addresses: list[str | None], first_key: int = 0) -> None:
        """Connect to every worker, once all have joined.

        Args:
            addresses: what `join` returned in each process, in their order.
            first_key: what all transfer keys are counted from, the same in all processes.
        """
        if self._transport is not None:
            self._transport.connect(addresses, first_key)


@contextmanager
def coordination(count: int, address: str | None) -> Iterator[tuple[str, Any]]:
    """Start JAX's coordination service for `count` workers in this process, the driver.

    It listens before the first worker asks: one that asks too early tries again after a second.

    Args:
        count: the number of workers.
        address: the address of this machine, at which a free port is chosen; None if all workers
            are on it, which then use a UNIX socket, removed at the end of the context: once all
            are connected.

    Yields:
        The service's address, and what keeps it until the workers have ended.
    """
    if address is None:
        folder = scratch.create()
        at = f"unix:{quote(str(folder.path))}/jax"
    else:
        with socket.socket() as probe:
            probe.bind((address, 0))
            folder, at = None, f"{address}:{probe.getsockname()[1]}"
    try:
        yield at, coordination_service(at, count)
    finally:
        if folder is not None:
            folder.remove()


def _rates(device: jax.Device) -> tuple[float, float]:
    """Return a device's rates in products of square matrices and in transfers from the host.

    They are those of the fastest round, so that other work on the host counts little; 0 where the
    device has no room for the matrices.
    """
    size = _SIDE[device.platform == "cpu"]
    block = np.ones((size, size), np.float32)
    product = jax.jit(lambda x: x @ x)
    rounds: list[tuple[float, float]] = []
    until = time.perf_counter() + _SECONDS
    try:
        while len(rounds) < 2 or (len(rounds) < _ROUNDS and time.perf_counter() < until):
            began = time.perf_counter()
            there = jax.block_until_ready(jax.device_put(block, device))
            moved = time.perf_counter()
            jax.block_until_ready(product(there))
            rounds.append((time.perf_counter() - moved, moved - began))
    except jax.errors.JaxRuntimeError:
        return 0.0, 0.0
    products, transfers = map(min, zip(*rounds, strict=True))
    return 2.0 * size**3 / products, block.nbytes / transfers
