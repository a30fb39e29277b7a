"""Workers on a Ray that the user has started, on this machine or on many."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from launcher.cluster.devices import EMULATED, STAND_INS, DevicePool
from launcher.cluster.errors import ClusterError
from launcher.cluster.ray import ray_compat, worker_actor
from launcher.cluster.ray.environment import worker_environment
from launcher.cluster.ray.worker import WorkerHandle, kill, not_started

# Ray tries for many minutes and cannot be interrupted from within its process, so another one tries
# first. Its watchdog ends it even if nobody else is left to do so.
_PROBE = """
import faulthandler, logging, sys
faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
import ray
ray.init(sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
"""
_END_SECONDS = 3.0  # for Ray to end the workers: one that is killed before is told as a failure
_MORE_SECONDS = 10  # that the probe's own watchdog waits longer than this process


class AttachedRay:
    """A connection to the Ray at `address`, or the one that this process already has.

    All nodes need this program, its libraries and the working folder in the same places. The output
    of the workers goes to Ray's own logs. Arrays travel between the nodes over ports that are open
    to their network.

    Args:
        address: the address of Ray, or "auto" for the one of this machine.
        num_nodes: the number of worker processes; None takes all nodes.
        num_devices_per_node: the devices of each worker; None takes all GPUs of a node.
        timeout: the seconds that Ray may take to answer, and again to start the workers' processes.

    Attributes:
        pool: the devices: one worker a node with its GPUs or, where no node has a GPU, with
            emulated CPU devices, of which several workers may share a node.

    Raises:
        ClusterError: there is no such Ray, or it has fewer nodes or GPUs than asked for.
    """

    def __init__(
        self,
        address: str,
        num_nodes: int | None,
        num_devices_per_node: int | None,
        timeout: float,
    ) -> None:
        if not is_connected():
            reach(address, timeout)
        import ray

        self._ray: Any = ray
        self._address, self._timeout = address, timeout
        self._actors: list[Any] = []
        self._undo = ExitStack()
        if not ray.is_initialized():
            try:
                ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
            except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
                raise ClusterError(f"no Ray can be reached at {address}: {error}") from error
            self._undo.callback(ray.shutdown)
        with ExitStack() as on_error:
            on_error.callback(self.close)
            nodes = [node for node in ray_compat.nodes() if node.is_alive]
            self.pool = choose_pool(nodes, num_nodes, num_devices_per_node)
            self._nodes = sorted(nodes, key=lambda node: (-node.gpus, node.node_id))
            on_error.pop_all()

    def spawn(self, worker_class: type, *arguments: Any) -> list[WorkerHandle]:
        """Start one process a host and build `worker_class(*arguments)` in each.

        See `PrivateRay.spawn`.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray_compat.register_by_value(worker_actor)
        actor_class = self._ray.remote(worker_actor.Worker)
        pickled = ray_compat.dumps((worker_class, arguments))
        search_path = [os.path.abspath(entry) for entry in sys.path]
        gpus = self.pool.devices_per_host if self.pool.kind == "gpu" else 0
        handles = []
        for index in range(self.pool.hosts):
            node = self._nodes[index % len(self._nodes)]
            environ = worker_environment(os.environ, self.pool, index)
            if gpus:
                environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray sets it
            actor = actor_class.options(
                num_cpus=0,
                num_gpus=gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            ).remote(environ, search_path, os.getcwd(), None)
            self._actors.append(actor)
            handles.append(WorkerHandle(actor, index, Path(os.devnull), node.address))
            actor.construct.remote(pickled)
        # Ends what Ray itself cannot, such as stopped workers.
        self._undo.callback(kill, handles, _END_SECONDS)
        if without := not_started(handles, self._timeout):
            reason = next(filter(None, without.values()), "it still tries")
            problem = f"Ray at {self._address} did not start {', '.join(without)} within"
            limit = f"{self._timeout:g} s (launcher.init(start_timeout=...))"
            hint = "`ray status` says which of its GPUs are in use"
            raise ClusterError(f"{problem} {limit}: {reason}; {hint}")
        return handles

    def check(self) -> None:
        """Return; a Ray of the user's reports the end of its workers by itself."""

    def close(self) -> None:
        """Have Ray end the workers, and end the connection if it is ours; may be called again."""
        for actor in self._actors:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        self._actors.clear()
        self._undo.close()


def is_connected() -> bool:
    """Return whether this process is connected to a Ray."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def reach(address: str, timeout: float) -> None:
    """Connect to a Ray from a process that can be given up.

    Raises:
        ClusterError: no Ray can be reached there.
    """
    command = [sys.executable, "-P", "-c", _PROBE, address, str(timeout + _MORE_SECONDS)]
    output: Any
    try:
        probe = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )
        if probe.returncode == 0:
            return
        output, problem = probe.stderr, f"no Ray can be reached at {address}"
    except subprocess.TimeoutExpired as error:
        output = (error.stderr or b"").decode(errors="replace")
        problem = (
            f"no Ray answers at {address}: waited {timeout:g} s (launcher.init(start_timeout=...))"
        )
    raise ClusterError(f"{problem}: {ray_compat.connection_problem(output)}")


def choose_pool(nodes: list[ray_compat.Node], hosts: int | None, devices: int | None) -> DevicePool:
    """Return the devices of a Ray's nodes to run on.

    Args:
        nodes: the nodes of the Ray.
        hosts: the number of nodes to use; None takes all.
        devices: the number of devices on each; None takes all GPUs.

    Raises:
        ClusterError: there are fewer nodes or GPUs than asked for.
    """
    with_gpus = [node.gpus for node in nodes if node.gpus]
    if not with_gpus:
        hosts, devices = hosts or len(nodes), devices or STAND_INS
        return DevicePool("cpu", hosts, devices, EMULATED, "")
    hosts = hosts or len(with_gpus)
    most = sorted(with_gpus, reverse=True)[:hosts]
    devices = devices or most[-1]
    if len(most) < hosts or devices > most[-1]:
        raise ClusterError(
            f"{hosts} nodes with {devices} GPUs each were asked for; this Ray has "
            f"{len(with_gpus)} nodes with {', '.join(map(str, with_gpus))} GPUs"
        )
    names = {name for node in nodes for name in node.gpu_names}
    return DevicePool("gpu", hosts, devices, min(names, default="GPU"), "")
