"""Measures what sums over the hosts cost here, with workers that are connected as a run's are."""

from __future__ import annotations

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

    They are those of the fastest round, so that other work on the machine counts little; a round
    lasts as long as the worker that began it first waits.

    Raises:
        ClusterError: Ray or a process did not come up, or does not answer.
        WorkerError: a process died.
    """
    with start(pool, None) as session:
        group = WorkerGroup(session.spawn(LinkMeter), session.check, _SECONDS, "task=calibrate")
        group.join()
        found = group.gather(group.submit("measure", _SIZES[pool.kind]), starting=True)
    return {
        str(size): min(max(of_round) for of_round in zip(*(of[k] for of in found), strict=True))
        for k, size in enumerate(_SIZES[pool.kind])
    }


class LinkMeter(Peer):
    """A worker that sums arrays with the others, and keeps the time."""

    def measure(self, sizes: tuple[int, ...]) -> list[list[float]]:
        """Return the seconds of each round's sum, for each size; the first, which compiles, is not.

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
            jax.block_until_ready(summed(x))
            durations = []
            for _ in range(_ROUNDS):
                began = time.perf_counter()
                jax.block_until_ready(summed(x))
                durations.append(time.perf_counter() - began)
            found.append(durations)
        return found
