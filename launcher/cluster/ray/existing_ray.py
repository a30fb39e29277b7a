"""Workers on an existing Ray cluster, on this machine or on many."""

from __future__ import annotations

import functools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.cluster.devices import EMULATED, STAND_INS, DevicePool
from launcher.cluster.errors import ClusterError, RayEndedError
from launcher.cluster.ray import ray_compat
from launcher.cluster.ray.ray_compat import Node
from launcher.cluster.ray.session import Place, RaySession, StartLimit
from launcher.cluster.ray.worker import WorkerHandle
from launcher.config.cluster import ray_address_problem

# Ray tries for many minutes and cannot be interrupted from within its process, so another one tries
# first. Its watchdog ends it even if nobody else is left to do so.
_PROBE = """
import faulthandler, json, logging, sys
faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
import ray
ray.init(sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
print(json.dumps(ray.nodes()))
"""
_LISTENS_SECONDS = 5.0  # to accept a connection; Ray itself tries for minutes
_MORE_SECONDS = 10  # by which the probe's own watchdog waits longer
_END_SECONDS = 3.0  # for Ray to end the workers: one that is killed sooner is reported as a failure
_STANDARD = "CPU", "GPU", "memory", "object_store_memory"  # resources of every node
_LEAVE_SECONDS = 15.0  # for Ray to disconnect, if it still answers


@dataclass(frozen=True)
class ResourceRequest:
    """The resources that each worker requests of Ray beside its GPUs.

    Attributes:
        num_cpus: the CPUs, as Ray counts them; a worker may use more.
        resources: the amount of each custom resource, by name, such as {"my_node": 1} or
            {"accelerator_type:H100": 0.001}.
    """

    num_cpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    def bundle(self, gpus: int) -> dict[str, float]:
        """Return the request of a worker with `gpus` GPUs, by Ray's names, without zeros."""
        amounts = {"CPU": self.num_cpus, "GPU": gpus, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount}


NO_REQUEST = ResourceRequest()


def check_feasible(bundle: Mapping[str, float], pool: DevicePool, nodes: Sequence[Node]) -> None:
    """Check that the nodes could hold the workers if nothing else ran there.

    Args:
        bundle: the resources that each worker requests.
        pool: the devices; workers with GPUs need a node each.
        nodes: the nodes of the Ray.

    Raises:
        ClusterError: they could not; the message names what is missing, and what each node has.
    """
    workers, spread = pool.hosts, pool.kind == "gpu"

    def capacity(names: Sequence[str]) -> int:
        each = (min(int(n.resources.get(k, 0) / bundle[k] + 1e-9) for k in names) for n in nodes)
        return sum(min(count, 1) if spread else count for count in each)

    if not bundle or capacity([*bundle]) >= workers:
        return
    missing = [name for name in bundle if capacity([name]) < workers] or [*bundle]
    wanted = _amounts(bundle, missing)
    has = "; ".join(f"{n.address} has {_amounts(n.resources, _shown(n, missing))}" for n in nodes)
    each = "each of " if workers > 1 else ""
    own = " on a node of its own" if spread and workers > 1 else ""
    raise ClusterError(
        f"{each}{workers} worker{'s' if workers > 1 else ''} demands {wanted}{own}, which this "
        f"Ray can never give: {has}"
    )


def _shown(node: Node, missing: Sequence[str]) -> list[str]:
    """Return the missing resources and the node's custom ones, which may be meant."""
    own = (k for k in node.resources if k not in _STANDARD and not k.startswith("node:"))
    return list(dict.fromkeys([*missing, *own]))


def _amounts(resources: Mapping[str, float], names: Iterable[str]) -> str:
    return ", ".join(f"{name}: {resources.get(name, 0):g}" for name in names)


class ExistingRay(RaySession):
    """A connection to the Ray at `address`, or the one that this process already has.

    All nodes need this program, its libraries and the working folder in the same places. Arrays
    travel between the nodes over ports that are open to their network. Every process that it starts
    ends with this process, however that ends.

    Args:
        address: the address of Ray, or "auto" for the one of this machine.
        num_nodes: the number of worker processes; None takes all nodes.
        num_devices_per_node: the devices of each worker; None takes all GPUs of a node.
        limit: how long Ray may take to answer, to free the resources, to start a process.
        request: the resources that each worker requests beside its GPUs.
        log_dir: a folder, on all nodes, for the output of the processes; None leaves it to Ray's
            own logs.

    Attributes:
        pool: the devices: one worker a node with its GPUs or, where no node has a GPU, with
            emulated CPU devices, of which several workers may share a node.

    Raises:
        ClusterError: there is no such Ray, or its nodes lack the requested resources.
    """

    def __init__(
        self,
        address: str,
        num_nodes: int | None,
        num_devices_per_node: int | None,
        limit: StartLimit,
        request: ResourceRequest = NO_REQUEST,
        log_dir: Path | None = None,
    ) -> None:
        super().__init__(limit, log_dir, _END_SECONDS)  # then it kills stopped workers
        if not is_connected():
            find_nodes(address, limit)
        import ray

        self._ray, self._address = ray, address
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self._connect()
            self._asked = num_devices_per_node, request
            if num_nodes is not None and limit.hosts is not None:
                there, what = functools.partial(self._most_hosts, num_nodes), "its nodes"
                self._await_hosts(num_nodes, there, what, limit.host_seconds)
                num_nodes = there() or num_nodes
            self._take_nodes(num_nodes)
            on_error.pop_all()

    def check(self) -> None:
        """Return: an existing Ray reports the end of its workers by itself."""

    def _take_nodes(self, hosts: int | None) -> None:
        """Take the devices of the nodes that are there; raise like `feasible_pool`."""
        self._nodes = ray_compat.nodes()
        self._known = [node.address for node in self._nodes]
        self.pool, self._bundle = feasible_pool(self._nodes, hosts, *self._asked)

    def _most_hosts(self, asked: int) -> int:
        """Return how many workers, at most `asked`, the nodes that are there can hold."""
        for hosts in range(asked, 0, -1):
            with suppress(ClusterError):
                self._take_nodes(hosts)
                return hosts
        return 0

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        self._join(self._address, _LEAVE_SECONDS)
        assert self._connecting is not None
        if not self._connecting.ended(0):
            raise ClusterError(self._late("answer", "it still tries"))
        try:
            self._connecting.result()
        except (self._ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            problem = ray_compat.connection_problem(str(error))
            raise ClusterError(f"no Ray can be reached at {self._address}: {problem}") from error

    def _worker_places(self) -> list[Place]:
        """Reserve the requested resources for all workers at once, by a placement group.

        Workers that request nothing need none.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if not self._bundle:
            return super()._worker_places()
        group, nodes = self._reserve()
        custom = dict(self._bundle)
        cpus, gpus = custom.pop("CPU", 0), custom.pop("GPU", 0)
        options = {"num_cpus": cpus, "num_gpus": gpus, "resources": custom}
        on_it = PlacementGroupSchedulingStrategy
        return [
            Place(host, node.address, {**options, "scheduling_strategy": on_it(group, host)})
            for host, node in enumerate(nodes)
        ]

    def _place(self, host: int) -> Place:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = self._nodes[host % len(self._nodes)]
        on_it = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        return Place(host, node.address, {"num_cpus": 0, "scheduling_strategy": on_it})

    def _reserve(self) -> tuple[Any, list[Node]]:
        """Wait for a placement group for all workers; return it and each worker's node."""
        hosts, util = self.pool.hosts, self._ray.util
        strategy = "STRICT_SPREAD" if self.pool.kind == "gpu" else "SPREAD"
        group = util.placement_group([self._bundle] * hosts, strategy)
        self._undo.callback(util.remove_placement_group, group)

        def reserved(seconds: float) -> bool:
            if util.placement_group_table(group)["state"] == "CREATED":
                return True
            if self._most_hosts(hosts) < hosts:
                raise RayEndedError(f"A node left the Ray at {self._address}.")
            time.sleep(seconds)
            return False

        wanted = _amounts(self._bundle, self._bundle)
        what = f"Ray at {self._address} to have {wanted} for each worker"
        if not self._waiting.until(reserved, what):
            left = _amounts(self._ray.available_resources(), self._bundle)
            what = f"have {wanted} free for each of {hosts} workers"
            raise ClusterError(self._late(what, f"free now are {left} in all"))
        node_of = util.placement_group_table(group)["bundles_to_node_id"]
        by_id = {node.node_id: node for node in self._nodes}
        return group, [by_id[node_of[i]] for i in range(hosts)]

    def _start(self, *process: Any) -> WorkerHandle:
        handle = super()._start(*process)
        self._undo.callback(self._end, handle.actor)
        return handle

    def _end(self, actor: Any) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(actor)

    def _check_started(self, missing: Mapping[str, str], in_time: bool) -> None:
        if missing:
            reason = next(filter(None, missing.values()), "it still tries")
            raise ClusterError(self._late(f"start {', '.join(missing)}", reason))

    def _late(self, what: str, reason: str) -> str:
        limit = f"within {self._limit.seconds:g} s ({self._limit.setting})"
        hint = "`ray status` shows what is in use there"
        return f"Ray at {self._address} did not {what} {limit}: {reason}; {hint}"


def is_connected() -> bool:
    """Return whether this process is connected to a Ray."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def find_nodes(address: str, limit: StartLimit) -> list[Node]:
    """Return the nodes of the Ray at an address, asked from a process that can be given up.

    Raises:
        ClusterError: no Ray can be reached there, or it is of another version.
    """
    if problem := ray_address_problem(address):
        raise ClusterError(f"{address} is not a usable address. {problem}")
    if address != "auto":
        _check_listening(address)
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


def _check_listening(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _LISTENS_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "`ray status` on one of its nodes shows its address"
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


def feasible_pool(
    nodes: list[Node], hosts: int | None, devices: int | None, request: ResourceRequest
) -> tuple[DevicePool, dict[str, float]]:
    """Return the devices to run on, see `choose_pool`, and all resources that each worker requests.

    Raises:
        ClusterError: the nodes lack the devices or the resources.
    """
    pool = choose_pool(nodes, hosts, devices)
    bundle = request.bundle(pool.devices_per_host if pool.kind == "gpu" else 0)
    check_feasible(bundle, pool, nodes)
    return pool, bundle
