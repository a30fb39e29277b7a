"""Inspect the workers of a session: run functions on their shards, compare replicas.

Where `launcher.init` has started no workers, this process is the only one.

What a function sees of its arguments, pytrees, is its caller's own:

- Of an array that a parallelized function returned, or `create`, `foreach_worker` shows the part
  that lies in the worker's process, and the other two the part that lies on the device. A
  replicated array is whole in each; of one that is cut, it is the worker's or the device's slice;
  and one without a part there, such as a parameter of another stage, is None, which
  `jax.tree.map` passes over.
- NumPy arrays, uncommitted arrays of JAX (as `jnp.ones` makes them) and values of Python are the
  same everywhere.

The arrays stay in use by the session: a function must not donate them to a jitted
function of its own. It must not wait for another worker, either; nothing says that all of them
call it at the same time. Functions travel like the steps, and what they print is in the worker's
log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from launcher.api.ray_backend import RayBackend
from launcher.api.remote_array import RemoteArray
from launcher.api.session import current
from launcher.hardware import WorkerInfo
from launcher.runtime import Digester, check_equal


def workers() -> list[WorkerInfo]:
    """Return each worker's index, address, process number and devices, in rank order.

    Raises:
        SessionError: this is one of several processes of `jax.distributed`.
        WorkerError: a worker died or failed before.
        HungError: a worker does not answer within `launcher.init(step_timeout=...)`.

    Example:
        >>> [worker.host for worker in launcher.workers()]
        [0]
    """
    return current().workers()


def foreach_worker(fn: Callable[..., Any], *trees: Any) -> list[Any]:
    """Call `fn(*trees)` once in every worker, on that worker's own copies.

    Args:
        fn: the function.
        *trees: its arguments, pytrees of arrays or other values; see the module for what it sees.

    Returns:
        What the workers returned, in rank order; arrays of JAX in it have become NumPy arrays.

    Raises:
        WorkerError: `fn` raised in a worker; the error names it and holds its traceback, and the
            session continues. In a session without workers it is the error of `fn` itself. It says
            so, too, where what a worker holds of an array is no slice of it: its devices are then
            no block of the logical mesh.
        TypeError: `fn` cannot be pickled.
        SessionError, HungError: as `workers`.

    Example:
        >>> launcher.foreach_worker(lambda w: w.shape, jnp.ones(3))
        [(3,)]
    """
    return current().foreach("worker", fn, trees)


def foreach_replica(fn: Callable[..., Any], *trees: Any) -> list[Any]:
    """Call `fn(*trees)` once for every device of every worker, on that device's own copies.

    A device is a replica under data parallelism; where stages or a model axis divide a replica over
    devices, each of these is called with what it holds.

    Args:
        fn: the function; arrays that it makes are made on its device.
        *trees: as in `foreach_worker`.

    Returns:
        What the calls returned, in the order in which a plan counts the devices.

    Raises:
        WorkerError: as `foreach_worker`; the traceback ends with the device's number.
        TypeError, SessionError, HungError: as `foreach_worker`.

    Example:
        >>> launcher.init("local", num_devices_per_node=2)
        >>> launcher.foreach_replica(lambda w: float(w.sum()), jnp.ones(3))
        [3.0, 3.0]
    """
    return current().foreach("replicas", fn, trees)


def on_first(fn: Callable[..., Any], *trees: Any) -> Any:
    """Call `fn(*trees)` on the own copies of the first worker's first device; return its result.

    Args:
        fn: as in `foreach_replica`.
        *trees: as in `foreach_worker`.

    Raises:
        WorkerError, TypeError, SessionError, HungError: as `foreach_replica`.

    Example:
        >>> launcher.on_first(lambda w: float(w.sum()), jnp.ones(3))
        3.0
    """
    (result,) = current().foreach("first", fn, trees)
    return result


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

    Example:
        >>> launcher.check_replicas({"weights": jnp.ones(3)})
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
