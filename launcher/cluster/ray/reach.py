"""A Ray that somebody has started: whether it answers, its nodes, and the devices to use there."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

from launcher.cluster.devices import EMULATED, STAND_INS, DevicePool
from launcher.cluster.errors import ClusterError
from launcher.cluster.ray import ray_compat
from launcher.cluster.ray.ray_compat import Node
from launcher.cluster.ray.waiting import StartLimit
from launcher.config.machines import ray_address_problem

# Ray tries for many minutes and cannot be interrupted from within its process, so another one tries
# first. Its watchdog ends it even if nobody else is left to do so.
_PROBE = """
import faulthandler, json, logging, sys
faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
import ray
ray.init(sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
print(json.dumps(ray.nodes()))
"""
_LISTENS_SECONDS = 5.0  # for an address to take a connection, where Ray itself tries for minutes
_MORE_SECONDS = 10  # that the probe's own watchdog waits longer than this process


def is_connected() -> bool:
    """Return whether this process is connected to a Ray."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def reach(address: str, limit: StartLimit) -> list[Node]:
    """Connect to a Ray from a process that can be given up; return the nodes of that Ray.

    Raises:
        ClusterError: no Ray can be reached there, or it is of another version.
    """
    if problem := ray_address_problem(address):
        raise ClusterError(f"{address} is not a usable address. {problem}")
    if address != "auto":
        _listens(address)
    timeout = limit.seconds
    command = [sys.executable, "-P", "-c", _PROBE, address, str(timeout + _MORE_SECONDS)]
    output: Any
    try:
        probe = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )
        if probe.returncode == 0:
            return ray_compat.nodes_of(json.loads(probe.stdout.splitlines()[-1]))
        output, problem = probe.stderr, f"no Ray can be reached at {address}"
    except subprocess.TimeoutExpired as error:
        output = (error.stderr or b"").decode(errors="replace")
        problem = f"no Ray answers at {address}: waited {timeout:g} s ({limit.setting})"
    raise ClusterError(f"{problem}: {ray_compat.connection_problem(output)}")


def _listens(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _LISTENS_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "`ray status` on a node of it tells its address"
        raise ClusterError(f"no Ray can be reached at {address}: {reason}; {hint}") from None


def choose_pool(nodes: list[Node], hosts: int | None, devices: int | None) -> DevicePool:
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


def gpus_of(pool: DevicePool) -> int:
    """Return the GPUs of each worker, none where CPU devices stand in."""
    return pool.devices_per_host if pool.kind == "gpu" else 0
