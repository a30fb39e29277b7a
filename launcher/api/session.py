"""Where parallelized functions run: in this process, or on workers that `init` has started.

The one thing that this package remembers between calls is held here, as `jax.distributed` holds
its own: what `init` has brought up. `launcher.api.parallelize` asks `current` for it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import jax

from launcher.api.ray_backend import RayBackend
from launcher.api.signature import Traceable
from launcher.api.step_worker import StepWorker
from launcher.cluster.devices import (
    EMULATED,
    STAND_INS,
    DevicePool,
    find_gpus,
    local_pool,
)
from launcher.cluster.ray import scratch
from launcher.cluster.ray.attached_ray import AttachedRay
from launcher.cluster.ray.private_ray import PrivateRay, start
from launcher.cluster.ray.waiting import Patience
from launcher.cluster.worker_group import WorkerGroup
from launcher.config.machines import Local
from launcher.plan import ClusterShape, Plan, local_shape
from launcher.plan.profile.calibration import calibrated
from launcher.runtime import Executable, Transport, compile_step
from launcher.trace import TracedStep


class SessionError(ValueError):
    """`init` cannot do what was asked; the message says why and what to do."""


@dataclass(frozen=True)
class LocalBackend:
    """This process's devices, or those of all processes under `jax.distributed`."""

    devices: tuple[jax.Device, ...] | None = None  # None: all there are
    transport: Transport | None = None

    @property
    def found(self) -> tuple[jax.Device, ...]:
        """The devices."""
        return self.devices or tuple(jax.devices())

    @property
    def shape(self) -> ClusterShape:
        """The cluster, for the planner, as it was calibrated if it was."""
        devices = self.found
        kind = "cpu" if devices[0].platform == "cpu" else devices[0].device_kind
        hosts = len({d.process_index for d in devices})
        nominal = local_shape(len(devices), hosts, kind)
        # Several processes plan each for itself, and alike: not by what one machine alone knows.
        return calibrated(nominal, _say) if hosts == 1 else nominal

    def compile(self, step: TracedStep, plan: Plan, source: Traceable) -> Executable:
        """Compile a traced step here; the counterpart of `RayBackend.compile`."""
        del source  # only others would have to trace it again
        return compile_step(step, plan, self.found, self.transport)


@dataclass(frozen=True)
class _Held:
    """What `init` brought up, and how to take it down."""

    backend: LocalBackend | RayBackend
    close: Callable[[], None]


_HERE = LocalBackend()
_held: _Held | None = None


def init(
    cluster: str = "ray",
    address: str | None = None,
    num_nodes: int | None = None,
    num_devices_per_node: int | None = None,
    step_timeout: float = 600.0,
    start_timeout: float = 120.0,
) -> None:
    """Say where parallelized functions run from now on; without it, on this process's devices.

    Args:
        cluster: "local" is this process. "ray" is worker processes, one a node, that Ray starts;
            this process then only plans and directs, on its CPU.
        address: of a Ray that is there ("auto" finds this machine's); None starts a private one
            on this machine, which ends with this process.
        num_nodes: how many worker processes. By default all nodes of the Ray at `address`; of a
            private Ray one. Several on one machine are emulated, with CPU devices.
        num_devices_per_node: by default all GPUs of a node, or 4 CPU devices that stand in; in
            the "local" case all devices of the process.
        step_timeout: the seconds that the workers may take to answer, such as to the fetch of a
            step's results; ten times that where they compile, and for the first step after it. Then
            they hang, or are stopped: `HungError` says where each stands.
        start_timeout: the seconds that Ray may take to come up or, at `address`, to answer, and
            that the workers' processes may.

    Functions travel to the workers pickled: what they refer to in importable modules has to be
    importable there too. Call it from the main thread, and before this process uses a GPU: the
    devices are for the workers. `shutdown` undoes it, and both may be called again.

    Raises:
        SessionError: it was called before, or the numbers do not fit the machine.
        ClusterError, WorkerError: Ray or a worker did not come up. Ctrl-C ends the wait.
    """
    global _held
    if _held is not None:
        raise SessionError("launcher.init was called before; call launcher.shutdown() first")
    if cluster not in ("local", "ray"):
        raise SessionError(f'cluster={cluster!r} is not one of "local", "ray"')
    numbers = {
        "num_nodes": num_nodes,
        "num_devices_per_node": num_devices_per_node,
        "step_timeout": step_timeout,
        "start_timeout": start_timeout,
    }
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise SessionError(f"{name}={number} has to be at least 1")
    if cluster == "local":
        _held = _Held(_this_process(address, num_nodes, num_devices_per_node), lambda: None)
    else:
        _held = _workers(address, num_nodes, num_devices_per_node, step_timeout, start_timeout)


def shutdown() -> None:
    """End the workers that `init` started, and forget what lies on them; fetch it before.

    Does nothing where there is nothing to end.
    """
    global _held
    held, _held = _held, None
    if held is not None:
        held.close()


def current() -> LocalBackend | RayBackend:
    """What `init` has brought up, or this process's devices."""
    return _HERE if _held is None else _held.backend


def _say(text: str) -> None:
    warnings.warn(text, stacklevel=3)


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


def _workers(
    address: str | None,
    nodes: int | None,
    devices: int | None,
    step_timeout: float,
    start_timeout: float,
) -> _Held:
    with ExitStack() as undo:
        session: PrivateRay | AttachedRay
        if address is not None:
            session = AttachedRay(address, nodes, devices, start_timeout)
            pool = session.pool
        else:
            pool = _private_pool(nodes or 1, devices)
            logs = scratch.create()  # not the session's own: that goes when Ray ends
            undo.callback(logs.remove)
            patience = Patience(start_timeout, "launcher.init(start_timeout=...)")
            session = start(pool, logs.path, patience=patience)
        undo.callback(session.close)
        if pool.kind == "gpu":
            jax.config.update("jax_platforms", "cpu")  # the devices are for the workers
        workers, setting = session.spawn(StepWorker), "launcher.init(step_timeout=...)"
        group = WorkerGroup(workers, session.check, step_timeout, setting)
        backend = RayBackend(group, _shape_of(pool))
        gone = SessionError("this belongs to a session that launcher.shutdown() has ended")
        undo.callback(backend.close, gone)
        return _Held(backend, undo.pop_all().close)


def _shape_of(pool: DevicePool) -> ClusterShape:
    kind = "cpu" if pool.kind == "cpu" else pool.device_name
    return calibrated(local_shape(pool.num_devices, pool.hosts, kind), _say)


def _private_pool(nodes: int, devices: int | None) -> DevicePool:
    """This machine's GPUs in one process, or CPU devices in `nodes` processes."""
    gpus = find_gpus(os.environ)
    if nodes == 1 and gpus.names and not gpus.problem:
        if devices is not None and devices > len(gpus.names):
            raise SessionError(
                f"num_devices_per_node={devices}, but this machine has {len(gpus.names)} GPUs; "
                "several nodes are emulated with CPU devices"
            )
        wanted = Local(gpus=devices)
        return local_pool(wanted, gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return DevicePool("cpu", nodes, devices or STAND_INS, EMULATED, "")
