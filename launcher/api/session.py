"""The backend on which parallelized functions run: this process, or workers started by `init`.

It is the only state that this package keeps between calls, as `jax.distributed` keeps its own. The
functions that run others on the workers' own copies of arrays, and compare replicas, use it: where
`init` has started no workers, this process is the only one.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax

from launcher.api.own_copies import Scope, call_here
from launcher.api.ray_backend import RayBackend, planned_shape
from launcher.api.remote_array import RemoteArray
from launcher.api.signature import Traceable
from launcher.api.step_worker import StepWorker
from launcher.cluster.devices import (
    EMULATED,
    STAND_INS,
    DevicePool,
    find_gpus,
    local_pool,
)
from launcher.cluster.kinds import pool_shape
from launcher.cluster.ray.existing_ray import (
    NO_REQUEST,
    ExistingRay,
    ResourceRequest,
    check_feasible,
    is_connected,
)
from launcher.cluster.ray.private_ray import PrivateRay
from launcher.cluster.ray.ray_compat import Node
from launcher.cluster.ray.session import RaySession, StartLimit
from launcher.cluster.ray.worker import LOOPBACK
from launcher.cluster.worker_group import WorkerGroup
from launcher.config.cluster import Local
from launcher.hardware import JAX_MEMORY_SHARE, WorkerInfo, memory_share
from launcher.plan import ClusterShape, Plan, local_shape
from launcher.plan.methods import Method
from launcher.runtime import (
    Digester,
    Executable,
    Transport,
    check_equal,
    compile_step,
    leaf_name,
)
from launcher.trace import TracedStep


class SessionError(ValueError):
    """`init` cannot do what was asked; the message says why and what to do."""


@dataclass(frozen=True)
class LocalBackend:
    """The devices of this process, or those of all processes under `jax.distributed`.

    Attributes:
        devices: the devices; None takes all.
        transport: moves arrays between processes, if the devices are of several.
    """

    devices: tuple[jax.Device, ...] | None = None
    transport: Transport | None = None

    @property
    def found(self) -> tuple[jax.Device, ...]:
        """The devices."""
        return self.devices or tuple(jax.devices())

    def shape(self, method: Method | None = None) -> ClusterShape:
        """Return the cluster that a method plans for; see `planned_shape`."""
        devices = self.found
        kind = "cpu" if devices[0].platform == "cpu" else devices[0].device_kind
        hosts = len({d.process_index for d in devices})
        share = memory_share(os.environ, JAX_MEMORY_SHARE)
        nominal = local_shape(len(devices), hosts, kind, share)
        if hosts > 1:  # each makes the same plan, so not from measurements of one machine
            return nominal
        shape = planned_shape(nominal, method, is_here=True)  # whose memory is that of a worker
        stats = {} if kind == "cpu" else devices[0].memory_stats() or {}
        return dataclasses.replace(shape, memory_bytes=stats.get("bytes_limit", shape.memory_bytes))

    def workers(self) -> list[WorkerInfo]:
        """Return a description of this process, the only worker."""
        self._check_alone()
        number = {device: i for i, device in enumerate(jax.devices())}
        devices = tuple(number[device] for device in self.found)
        return [WorkerInfo(0, LOOPBACK, os.getpid(), devices)]

    def foreach(self, scope: Scope, fun: Callable[..., Any], trees: Sequence[Any]) -> list[Any]:
        """Call a function on this process's copies of arrays; see `RayBackend.foreach`.

        Raises:
            SessionError: an array is of workers whose session has ended.
            Exception: what `fun` raises.
        """
        self._check_alone()
        if any(isinstance(leaf, RemoteArray) for leaf in jax.tree.leaves(tuple(trees))):
            raise SessionError(
                "an array is of workers whose session has ended; call launcher.init again and make "
                "it anew"
            )
        return call_here(fun, trees, scope, self.found)

    def _check_alone(self) -> None:
        if jax.process_count() > 1:
            raise SessionError(
                "launcher knows the workers that launcher.init has started; under jax.distributed "
                "every process runs the script, and calls such a function itself"
            )

    def compile(self, step: TracedStep, plan: Plan, source: Traceable) -> Executable:
        """Compile a traced step here; the counterpart of `RayBackend.compile`."""
        del source  # only other processes would have to trace it again
        return compile_step(step, plan, self.found, self.transport)


_HERE = LocalBackend()
# The backend that `init` has brought up, and the function that takes it down.
_Held = tuple[LocalBackend | RayBackend, Callable[[], None]]
_held: _Held | None = None


def init(  # noqa: PLR0913 (what a script may ask for)
    cluster: str = "ray",
    address: str | None = None,
    num_nodes: int | None = None,
    num_devices_per_node: int | None = None,
    step_timeout: float = 600.0,
    start_timeout: float = 120.0,
    num_cpus: float = 0,
    resources: Mapping[str, float] | None = None,
) -> None:
    """Select where parallelized functions run; without it, they run on this process's devices.

    What the script defines travels to the workers by value; the modules that it imports have to be
    importable there, too. Call it from the main thread, and before this process uses a GPU: the
    devices are for the workers. `shutdown` undoes it, and both may be called again.

    Args:
        cluster: "local" is this process. "ray" is worker processes, one a node, that Ray starts;
            this process then only plans and directs, on its CPU.
        address: the address of a running Ray ("auto" finds this machine's). None takes the Ray that
            this process is connected to, if `ray.init` was called, and else starts a private one on
            this machine, which ends with this process.
        num_nodes: the number of worker processes. The default is all nodes of the Ray at `address`,
            and one of a private Ray. Several on one machine are emulated with CPU devices.
        num_devices_per_node: the devices of each worker, by default all GPUs of a node or else 4
            emulated CPU devices; for "local", by default all devices of the process.
        step_timeout: the seconds that the workers may take to answer, such as to the fetch of a
            step's results. Where they compile or connect, they may take 120 s without progress.
            Workers that take longer hang or are stopped, and `HungError` says what each is doing.
        start_timeout: the seconds that Ray may take to come up or, at `address`, to answer, and
            then each further process of the workers.
        num_cpus: the CPUs that each worker demands of Ray; it may use more.
        resources: the amount of each custom resource requested per worker from the Ray at
            `address`, by name, such as {"my_node": 1}.

    Raises:
        SessionError: it was called before, or the numbers do not fit the machine.
        ClusterError: Ray or a worker's process did not come up. Ctrl-C ends the wait.
        WorkerError: a worker failed.

    Example:
        >>> launcher.init("local", num_devices_per_node=2)
        >>> len(launcher.workers()[0].devices)
        2
        >>> launcher.shutdown()
    """
    global _held
    if _held is not None:
        raise SessionError("launcher.init was called before; call launcher.shutdown() first")
    if cluster not in ("local", "ray"):
        raise SessionError(f'cluster={cluster!r} is not one of "local", "ray"')
    _check_positive(
        num_nodes=num_nodes,
        num_devices_per_node=num_devices_per_node,
        step_timeout=step_timeout,
        start_timeout=start_timeout,
    )
    demand = ResourceRequest(num_cpus, dict(resources or {}))
    _check_demands(cluster, demand)
    if cluster == "local":
        _held = _this_process(address, num_nodes, num_devices_per_node), lambda: None
    else:
        limit = StartLimit(start_timeout, "launcher.init(start_timeout=...)")
        session = _session(address, num_nodes, num_devices_per_node, limit, demand)
        _held = _workers(session, step_timeout)
        atexit.register(shutdown)  # before Ray's own, which was registered before


def shutdown() -> None:
    """End the workers that `init` started; arrays that lie on them and were not fetched are lost.

    It does nothing if there is nothing to end. A program that ends without it calls it by itself.

    Example:
        >>> launcher.init("local")
        >>> launcher.shutdown()
    """
    global _held
    held, _held = _held, None
    atexit.unregister(shutdown)
    if held is not None:
        _, close = held
        close()


def current() -> LocalBackend | RayBackend:
    """Return the backend that `init` has brought up, or this process's devices."""
    return _HERE if _held is None else _held[0]


def is_up() -> bool:
    """Return whether `init` has been called, and `shutdown` not yet."""
    return _held is not None


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

    What `fn` sees of its arguments, here and in `foreach_replica` and `on_first`, is its caller's
    own:

    - Of an array that a parallelized function returned, or `create`, `foreach_worker` shows the
      part that lies in the worker's process, and the other two the part that lies on the device. A
      replicated array is whole in each; of one that is cut, it is the worker's or the device's
      slice; and one without a part there, such as a parameter of another stage, is None, which
      `jax.tree.map` passes over.
    - NumPy arrays, uncommitted arrays of JAX (as `jnp.ones` makes them) and values of Python are
      the same everywhere.

    The arrays stay in use by the session: a function must not donate them to a jitted function of
    its own. It must not wait for another worker, either; nothing says that all of them call it at
    the same time. Functions travel like the steps, and what they print is in the worker's log.

    Args:
        fn: the function.
        *trees: its arguments, pytrees of arrays or other values.

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
    remote = {leaf_name(path): leaf for path, leaf in leaves if isinstance(leaf, RemoteArray)}
    here = {leaf_name(path): leaf for path, leaf in leaves if isinstance(leaf, jax.Array)}
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


def _check_positive(**numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise SessionError(f"{name}={number} must be at least 1")


def _this_process(address: str | None, nodes: int | None, devices: int | None) -> LocalBackend:
    if address is not None or nodes not in (None, 1):
        raise SessionError(
            'cluster="local" is this process: leave address and num_nodes out, or say cluster="ray"'
        )
    there = jax.devices()
    if devices is not None and devices > len(there):
        raise SessionError(
            f"num_devices_per_node={devices}, but this process has {len(there)} devices "
            '(jax.config.update("jax_num_cpu_devices", n) before JAX is first used makes n of them)'
        )
    return LocalBackend(tuple(there[:devices]))


def _check_demands(cluster: str, demand: ResourceRequest) -> None:
    demands = {"num_cpus": demand.num_cpus} | {
        f"resources[{name!r}]": amount for name, amount in demand.resources.items()
    }
    for name, amount in demands.items():
        if amount < 0 or (amount == 0 and name != "num_cpus"):
            raise SessionError(
                f"{name}={amount:g} demands nothing; give more than 0, or leave it out"
            )
    for name in {"CPU", "GPU"} & {*demand.resources}:
        argument = {"CPU": "num_cpus", "GPU": "num_devices_per_node"}[name]
        raise SessionError(f"resources[{name!r}] cannot be set here: use {argument}=")
    if cluster == "local" and demand != NO_REQUEST:
        raise SessionError(
            'num_cpus= and resources= are demands on a Ray, and cluster="local" is this process: '
            "leave them out"
        )


def _session(
    address: str | None,
    nodes: int | None,
    devices: int | None,
    limit: StartLimit,
    demand: ResourceRequest,
) -> RaySession:
    """Return the Ray on which workers can start."""
    if address is None and is_connected():
        address = "auto"
    if address is not None:
        return ExistingRay(address, nodes, devices, limit, demand)
    pool = _private_pool(nodes or 1, devices)
    here = Node("", "a private one on this machine", {"CPU": float(os.cpu_count() or 1)})
    on_one = dataclasses.replace(pool, kind="cpu")  # which its workers share
    check_feasible(demand.bundle(0), on_one, [here])
    return PrivateRay(pool, None, limit=limit)


def _workers(session: RaySession, step_timeout: float) -> _Held:
    with ExitStack() as undo:
        undo.callback(session.close)
        if session.pool.kind == "gpu":
            jax.config.update("jax_platforms", "cpu")  # the devices are for the workers
        workers, setting = session.spawn(StepWorker), "launcher.init(step_timeout=...)"
        group = WorkerGroup(workers, session.check, step_timeout, setting)
        is_here = isinstance(session, PrivateRay)
        backend = RayBackend(group, pool_shape(session.pool), session.serve, is_here)
        text = "this belongs to a session that launcher.shutdown() has ended"
        gone = SessionError(f"{text}; call launcher.init again and create it again")
        undo.callback(backend.close, gone)
        return backend, undo.pop_all().close


def _private_pool(nodes: int, devices: int | None) -> DevicePool:
    """Return this machine's GPUs in one process, or CPU devices in `nodes` processes."""
    gpus = find_gpus(os.environ)
    if nodes == 1 and gpus.usable:
        if devices is not None and devices > len(gpus.names):
            raise SessionError(
                f"num_devices_per_node={devices}, but this machine has {len(gpus.names)} GPUs; "
                "several nodes are emulated with CPU devices"
            )
        wanted = Local(gpus=devices)
        return local_pool(wanted, gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return DevicePool("cpu", nodes, devices or STAND_INS, EMULATED, "")
