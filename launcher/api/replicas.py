"""`launcher.check_replicas`: whether the replicas of arrays hold the same bits."""

from __future__ import annotations

from typing import Any

import jax

from launcher.api.ray_backend import RayBackend
from launcher.api.remote_array import RemoteArray
from launcher.api.session import current
from launcher.runtime import Digester, check_equal


def check_replicas(tree: Any) -> None:
    """Compare the replicas of all arrays of a pytree, bit by bit, by digests.

    The digests are made where the arrays lie, a few bytes for each array and device; no array is
    moved. Leaves without replicas count as equal: arrays that lie on one device, or sharded over
    all devices, and NumPy's. If the devices belong to several processes under `jax.distributed`,
    all of them call it.

    Args:
        tree: arrays of this process, or handles to arrays on the workers.

    Raises:
        ReplicaError: replicas differ; the message names an array by its path in the tree, the
            device that differs from most others, and its process.
        TypeError: a handle belongs to a session that was shut down.
        WorkerError: a worker failed.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    remote = {_name(path): leaf for path, leaf in leaves if isinstance(leaf, RemoteArray)}
    here = {_name(path): leaf for path, leaf in leaves if isinstance(leaf, jax.Array)}
    parts = []
    if remote:
        backend = current()
        if not isinstance(backend, RayBackend):
            raise TypeError(
                f"{next(iter(remote.values()))!r} belongs to a session that was shut down"
            )
        parts += backend.digests(remote)
    if here:
        digester = Digester(here, gathered=jax.process_count() > 1)
        parts.append(digester.finish(digester.start(here)))
    check_equal(parts)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
