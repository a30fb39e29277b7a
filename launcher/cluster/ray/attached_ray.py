"""Workers on a Ray that is there already: one that the user started, on this machine or on many.

The counterpart of `session`, which starts a private Ray. The Python front imports it.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from launcher.cluster.devices import EMULATED, STAND_INS, DevicePool
from launcher.cluster.errors import ClusterError
from launcher.cluster.ray import worker_actor
from launcher.cluster.ray.environment import worker_environment
from launcher.cluster.ray.worker import WorkerHandle, kill, without_place

# Ray tries for many minutes, and cannot be interrupted from its own process. The watchdog ends this
# one also where nobody is left to.
_PROBE = """
import faulthandler, logging, sys
faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
import ray
ray.init(sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
"""
_WARNING = re.compile(r"\[[^\]]+ [WE] [^\]]+\] \S+: (.*)")
_MORE_SECONDS = 10  # that the probe may have, which is told the deadline


class AttachedRay:
    """A connection to the Ray at `address`, or the one that this process already has.

    All nodes need this program, its libraries and the working folder in the same places. The
    workers' output goes to Ray's own logs. Arrays travel between the nodes over ports that are
    open to their network.

    Args:
        timeout: the seconds that it may take to answer, and again to start the workers' processes.

    Attributes:
        pool: the devices: one worker a node with its GPUs, or, where a node has none, with CPU
            devices that stand in; several of these may share a node.

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
        if "ray" not in sys.modules or not sys.modules["ray"].is_initialized():
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
            nodes = [node for node in ray.nodes() if node["Alive"]]
            self.pool = choose_pool(nodes, num_nodes, num_devices_per_node)
            self._nodes = sorted(nodes, key=lambda node: (-_gpus(node), node["NodeID"]))
            on_error.pop_all()

    def spawn(self, worker_class: type, *arguments: Any) -> list[WorkerHandle]:
        """Start one process a host and build `worker_class(*arguments)` in each; see
        `PrivateRay.spawn`."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray.cloudpickle.register_pickle_by_value(worker_actor)
        actor_class = self._ray.remote(worker_actor.Worker)
        pickled = self._ray.cloudpickle.dumps((worker_class, arguments))
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
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            ).remote(environ, search_path, os.getcwd(), None)
            self._actors.append(actor)
            address = node["NodeManagerAddress"]
            handles.append(WorkerHandle(actor, index, Path(os.devnull), address))
            actor.construct.remote(pickled)
        self._undo.callback(kill, handles)  # what Ray's own way cannot end, as where it is stopped
        if without := without_place(handles, self._timeout):
            told = next(filter(None, without.values()), "it still tries")
            problem = f"Ray at {self._address} did not start {', '.join(without)} within"
            limit = f"{self._timeout:g} s (launcher.init(start_timeout=...))"
            hint = "`ray status` says which of its GPUs are in use"
            raise ClusterError(f"{problem} {limit}: {told}; {hint}")
        return handles

    def check(self) -> None:
        """Raise where the workers can never answer again. Ray itself says so of its workers."""

    def close(self) -> None:
        """Have Ray end the workers, and end the connection if it is ours. May be called again."""
        for actor in self._actors:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        self._actors.clear()
        self._undo.close()


def reach(address: str, timeout: float) -> None:
    """Connect to a Ray from a process that can be given up. Raises ClusterError."""
    command = [sys.executable, "-P", "-c", _PROBE, address, str(timeout + _MORE_SECONDS)]
    told: Any
    try:
        probe = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )
        if probe.returncode == 0:
            return
        told, problem = probe.stderr, f"no Ray can be reached at {address}"
    except subprocess.TimeoutExpired as error:
        told = (error.stderr or b"").decode(errors="replace")
        problem = (
            f"no Ray answers at {address}: waited {timeout:g} s (launcher.init(start_timeout=...))"
        )
    raise ClusterError(f"{problem}: {_reason(told)}")


def _reason(output: str) -> str:
    """The last thing that Ray's own code has told of why it cannot connect, which its exception
    does not, and else the exception."""
    lines = output.strip().splitlines() or ["it says nothing"]
    told = [found[1] for line in lines if (found := _WARNING.match(line))]
    return told[-1] if told else lines[-1]


def _gpus(node: dict[str, Any]) -> int:
    return int(node["Resources"].get("GPU", 0))


def choose_pool(nodes: list[dict[str, Any]], hosts: int | None, devices: int | None) -> DevicePool:
    """The devices of a Ray's nodes, as far as they are asked for."""
    with_gpus = [_gpus(node) for node in nodes if _gpus(node)]
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
    kinds = {name for node in nodes for name in node["Resources"]}
    named = [k.partition(":")[2] for k in sorted(kinds) if k.startswith("accelerator_type:")]
    return DevicePool("gpu", hosts, devices, named[0] if named else "GPU", "")
