"""Measures what sums over the hosts cost here, with workers that are connected as a run's are."""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher.cluster.devices import DevicePool
from launcher.cluster.process_group import Peer
from launcher.cluster.ray.private_ray import start
from launcher.cluster.worker_group import WorkerGroup

_SECONDS = 60.0  # for all rounds
_ROUNDS = 12
_SIZES = {"cpu": (1 << 12, 1 << 24), "gpu": (1 << 16, 1 << 28)}  # bytes


def measure_links(pool: DevicePool) -> dict[str, float]:
    """Return the seconds of an all-reduce over all devices of a pool's hosts, by its bytes.

    Raises:
        ClusterError: Ray or a process did not come up, or does not answer.
        WorkerError: a process died.
    """
    with start(pool, None) as session:
        group = WorkerGroup(session.spawn(LinkMeter), session.check, _SECONDS, "task=calibrate")
        group.join()
        found = group.gather(group.submit("measure", _SIZES[pool.kind]), starting=True)
    return {
        str(size): statistics.median(one[k] for one in found)
        for k, size in enumerate(_SIZES[pool.kind])
    }


class LinkMeter(Peer):
    """A worker that sums arrays with the others, and keeps the time."""

    def measure(self, sizes: tuple[int, ...]) -> list[float]:
        """Return the seconds of the fastest sum of each size, so that other work counts little.

        All workers call it together.

        Args:
            sizes: bytes of an array on each device.
        """
        mesh = Mesh(np.array(jax.devices()), ("device",))
        each = PartitionSpec("device")
        summed = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x, "device"), mesh=mesh, in_specs=each, out_specs=each
            )
        )
        found = []
        for size in sizes:
            shape = len(jax.devices()), size // 4
            x = jax.jit(lambda of=shape: jnp.ones(of), out_shardings=NamedSharding(mesh, each))()
            durations = []
            for _ in range(_ROUNDS):
                jax.block_until_ready(x)
                began = time.perf_counter()
                jax.block_until_ready(summed(x))
                durations.append(time.perf_counter() - began)
            found.append(min(durations))
        return found
