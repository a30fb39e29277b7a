"""Measure collectives between the hosts, and sums through a parameter server.

The workers are connected as a run's are.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher.cluster.devices import DevicePool
from launcher.cluster.process_group import Peer
from launcher.cluster.ray.parameter_server import ServerClient
from launcher.cluster.ray.private_ray import PrivateRay
from launcher.cluster.worker_group import WorkerGroup

_SECONDS = 60.0  # for all rounds
_ROUNDS = 12
_SIZES = {"cpu": (1 << 12, 1 << 24), "gpu": (1 << 16, 1 << 28)}  # bytes
_SMALL, _LARGE = 1 << 8, 1 << 22  # float32 numbers of a part: 1 KiB and 16 MiB
_EXCHANGES = 30
_RUN: dict[str, Callable[[Any], Any]] = {
    "all-reduce": lambda x: jax.lax.psum(x, "device"),
    "all-gather": lambda x: jax.lax.all_gather(x, "device", tiled=True),
    "reduce-scatter": lambda x: jax.lax.psum_scatter(x, "device", tiled=True),
}


Row = tuple[str, int, int, int, float]  # see `plan.profile.calibration.TimedCollective`


def measure_links(pool: DevicePool) -> list[Row]:
    """Return the durations of collectives between a pool's hosts.

    They run in a ring of all devices, and in one for each of a host's, which share its link. They
    are those of the fastest round, so that other work on the machine counts little; a round lasts
    as long as the worker that began it first waits.

    Raises:
        ClusterError: Ray or a process did not come up, or does not answer.
        WorkerError: a process died.
    """
    numbers = sorted({1, pool.devices_per_host})
    ways = list(itertools.product(_RUN, numbers, _SIZES[pool.kind]))
    with PrivateRay(pool, None) as session:
        group = WorkerGroup(session.spawn(LinkMeter), session.check, _SECONDS, "task=calibrate")
        group.join()
        found = group.gather(group.call("measure", ways), starting=True)
    return [
        (kind, pool.num_devices // rings, rings, size, min(map(max, *of)))
        for (kind, rings, size), *of in zip(ways, *found, strict=True)
    ]


class LinkMeter(Peer):
    """A worker that times collectives with the others."""

    def measure(self, ways: Sequence[tuple[str, int, int]]) -> list[list[float]]:
        """Return the seconds of each round's collective; the first, which compiles, is not.

        All workers call it together.

        Args:
            ways: kind, number of rings, and bytes of the array on a device where it is whole.
        """
        devices, found = np.array(jax.devices()), []
        for kind, rings, size in ways:
            mesh = Mesh(devices.reshape(-1, rings).T, ("ring", "device"))
            each, part = PartitionSpec(("ring", "device")), size // 4 // mesh.shape["device"]
            length = part * (1 if kind == "all-gather" else mesh.shape["device"]) * devices.size
            where = NamedSharding(mesh, each)
            x = jax.jit(lambda of=length: jnp.ones(of), out_shardings=where)()
            run = jax.jit(jax.shard_map(_RUN[kind], mesh=mesh, in_specs=each, out_specs=each))
            jax.block_until_ready(run(x))
            durations = []
            for _ in range(_ROUNDS):
                began = time.perf_counter()
                jax.block_until_ready(run(x))
                durations.append(time.perf_counter() - began)
            found.append(durations)
        return found


def measure_servers(pool: DevicePool) -> list[float]:
    """Return the rates that the workers of a pool find, in the median; see `ExchangeMeter.measure`.

    Raises:
        ClusterError: Ray or a process did not come up, or does not answer.
        WorkerError: a process died.
    """
    with PrivateRay(pool, None) as session:
        workers, servers = session.spawn(ExchangeMeter), session.serve(1, pool.hosts)
        group = WorkerGroup(workers, session.check, _SECONDS, "task=calibrate")
        group.use_servers(servers)
        found = group.gather(group.call("measure"), starting=True)
    return [statistics.median(of) for of in zip(*found, strict=True)]


class ExchangeMeter(Peer):
    """A worker that times exchanges of zeros with one server."""

    def measure(self) -> tuple[float, float, float, float]:
        """Return the rates of the fastest rounds, so that other work on the machine counts little.

        All workers call it together.

        Returns:
            With all workers busy, the seconds of an exchange of a small array, from put to get; and
                the bytes/s that a worker packs and writes to Ray's object store, that a server adds
                (of all parts, with the writing of the sum), and that a worker copies out of it.
        """
        client = self._servers
        assert client is not None
        spec: Any = SimpleNamespace(name="measurement", kind="sum", server=0)
        client.open([spec])
        small = [_exchange(client, _SMALL) for _ in range(_EXCHANGES)]
        large = [_exchange(client, _LARGE) for _ in range(_EXCHANGES)]
        latency = min(put + wait for put, wait, _ in small)
        put, wait, get = (min(times) for times in zip(*large, strict=True))
        size = 4.0 * _LARGE
        adding = max(wait - latency, latency)
        return latency, size / put, size * client.count / adding, size / get


def _exchange(client: ServerClient, size: int) -> tuple[float, float, float]:
    """Exchange `size` numbers; return the seconds to put, wait and read."""
    gradients, call = [np.zeros(size // 2, np.float32)] * 2, client.reserve()
    began = time.perf_counter()
    part = np.concatenate(gradients)
    client.put(call, 0, part)
    given = time.perf_counter()
    whole = client.get(call, 0)
    there = time.perf_counter()
    np.copyto(part, whole)
    return given - began, there - given, time.perf_counter() - there
