"""Workers on a Ray that somebody has started, on this machine or on many."""

from __future__ import annotations

import functools
import logging
import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from launcher.base.output import Advance
from launcher.cluster.errors import ClusterError, RayEndedError
from launcher.cluster.ray import ray_compat, worker_actor
from launcher.cluster.ray.demand import NOTHING, Demand, check_demand
from launcher.cluster.ray.environment import worker_environment
from launcher.cluster.ray.ray_compat import Node
from launcher.cluster.ray.reach import choose_pool, gpus_of, is_connected, reach
from launcher.cluster.ray.start_process import start_server, start_worker
from launcher.cluster.ray.waiting import BackgroundCall, StartLimit, Waiting
from launcher.cluster.ray.worker import WorkerHandle, kill, not_started

_END_SECONDS = 3.0  # for Ray to end the workers: one that is killed before is told as a failure
_LEAVE_SECONDS = 15.0  # for Ray to disconnect, if it still answers


class AttachedRay:
    """A connection to the Ray at `address`, or the one that this process already has.

    It is a context manager, to be used from the main thread. All nodes need this program, its
    libraries and the working folder in the same places. Arrays travel between the nodes over ports
    that are open to their network. What it starts there ends with this process, however that ends.

    Args:
        address: the address of Ray, or "auto" for the one of this machine.
        num_nodes: the number of worker processes; None takes all nodes.
        num_devices_per_node: the devices of each worker; None takes all GPUs of a node.
        limit: how long Ray may take to answer, to have what is demanded, to start a process.
        demand: what each worker demands of Ray beside its GPUs.
        log_dir: a folder, on all nodes, for the workers' output (`worker_<host>.log`); None leaves
            it to Ray's own logs.

    Attributes:
        pool: the devices: one worker a node with its GPUs or, where no node has a GPU, with
            emulated CPU devices, of which several workers may share a node.

    Raises:
        ClusterError: there is no such Ray, or its nodes have not what is asked for.
    """

    def __init__(
        self,
        address: str,
        num_nodes: int | None,
        num_devices_per_node: int | None,
        limit: StartLimit,
        demand: Demand = NOTHING,
        log_dir: Path | None = None,
    ) -> None:
        if not is_connected():
            reach(address, limit)
        import ray

        self._ray: Any = ray
        self._address, self._limit, self._log_dir = address, limit, log_dir
        self._undo = ExitStack()
        with ExitStack() as on_error:
            on_error.callback(self.close)
            if not ray.is_initialized():
                self._connect()
            self._nodes = ray_compat.nodes()
            self.pool = choose_pool(self._nodes, num_nodes, num_devices_per_node)
            self._bundle = demand.bundle(gpus_of(self.pool))
            check_demand(self._bundle, self.pool, self._nodes)
            on_error.pop_all()

    def spawn(
        self, worker_class: type, *arguments: Any, advance: Advance | None = None
    ) -> list[WorkerHandle]:
        """Start one process a host and build `worker_class(*arguments)` in each.

        See `PrivateRay.spawn`.
        """
        waiting, handles = Waiting(self._limit, advance), list[WorkerHandle]()
        places = self._places(waiting)
        # Ends what Ray itself cannot, such as stopped workers.
        self._undo.callback(kill, handles, _END_SECONDS)
        try:
            for index, (node, options) in enumerate(places):
                handles.append(self._start(index, node, options, (worker_class, arguments)))
        except self._ray.exceptions.RayError as error:
            raise RayEndedError(f"Ray cannot start the workers: {error}") from error
        without: dict[str, str] = {}

        def over(seconds: float) -> bool:
            nonlocal without
            without = not_started(handles, seconds)
            waiting.counts(len(handles) - len(without), len(handles), "processes")
            return not without or any(without.values())

        waiting.until(over, f"Ray at {self._address} to start the workers' processes")
        if without:
            reason = next(filter(None, without.values()), "it still tries")
            raise ClusterError(self._late(f"start {', '.join(without)}", reason))
        return handles

    def serve(self, count: int, workers: int) -> list[WorkerHandle]:
        """Start `count` parameter servers and wait for none of them; see `PrivateRay.serve`."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        handles: list[WorkerHandle] = []
        self._undo.callback(kill, handles, _END_SECONDS)
        for number in range(count):
            host = number % self.pool.hosts
            node = self._nodes[host % len(self._nodes)]
            there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            options = {"num_cpus": 0, "scheduling_strategy": there}
            environ, where = worker_environment(os.environ, self.pool, host), (host, node.address)
            log = None if self._log_dir is None else self._log_dir / f"server_{number}.log"
            handles.append(start_server(number, workers, options, environ, log, where))
            self._undo.callback(self._end, handles[-1].actor)
        return handles

    def check(self) -> None:
        """Return; a Ray of the user's reports the end of its workers by itself."""

    def close(self) -> None:
        """Have Ray end the workers, and end the connection if it is ours; may be called again.

        An interrupt that comes during that is raised when it is done.
        """
        BackgroundCall(self._undo.close).finish()

    def __enter__(self) -> AttachedRay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self) -> None:
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        connecting = BackgroundCall(functools.partial(self._ray.init, self._address, **quiet))

        def leave() -> None:
            if connecting.ended(_LEAVE_SECONDS):  # not beside it
                BackgroundCall(self._ray.shutdown).ended(_LEAVE_SECONDS)

        self._undo.callback(leave)
        try:
            if not Waiting(self._limit).until(connecting.ended, f"Ray's answer at {self._address}"):
                raise ClusterError(self._late("answer", "it still tries"))
            connecting.result()
        except (self._ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            problem = ray_compat.connection_problem(str(error))
            raise ClusterError(f"no Ray can be reached at {self._address}: {problem}") from error
        finally:
            ray_compat.restore_signals(worker_actor.FOR_THE_DRIVER)

    def _places(self, waiting: Waiting) -> list[tuple[Node, dict[str, Any]]]:
        """Return the node of each worker, and the options that bring its actor there.

        What the workers demand is reserved for all of them at once, by a placement group. Workers
        that demand nothing need none.
        """
        from ray.util import scheduling_strategies as to

        hosts = range(self.pool.hosts)
        if self._bundle:
            group, nodes = self._reserve(waiting)
            there: list[Any] = [to.PlacementGroupSchedulingStrategy(group, i) for i in hosts]
        else:
            nodes = [self._nodes[i % len(self._nodes)] for i in hosts]
            there = [to.NodeAffinitySchedulingStrategy(n.node_id, soft=False) for n in nodes]
        options = _options(self._bundle)
        return [
            (node, {**options, "scheduling_strategy": strategy})
            for node, strategy in zip(nodes, there, strict=True)
        ]

    def _reserve(self, waiting: Waiting) -> tuple[Any, list[Node]]:
        """Wait for a placement group for all workers; return it and each worker's node."""
        hosts, util = self.pool.hosts, self._ray.util
        strategy = "STRICT_SPREAD" if gpus_of(self.pool) else "SPREAD"
        group = util.placement_group([self._bundle] * hosts, strategy)
        self._undo.callback(util.remove_placement_group, group)

        def reserved(seconds: float) -> bool:
            if util.placement_group_table(group)["state"] == "CREATED":
                return True
            time.sleep(seconds)
            return False

        wanted = ", ".join(f"{name}: {amount:g}" for name, amount in self._bundle.items())
        if not waiting.until(reserved, f"Ray at {self._address} to have {wanted} for each worker"):
            free = self._ray.available_resources()
            left = ", ".join(f"{name}: {free.get(name, 0):g}" for name in self._bundle)
            what = f"have {wanted} free for each of {hosts} workers"
            raise ClusterError(self._late(what, f"free now are {left} in all"))
        node_of = util.placement_group_table(group)["bundles_to_node_id"]
        by_id = {node.node_id: node for node in self._nodes}
        return group, [by_id[node_of[i]] for i in range(hosts)]

    def _start(self, index: int, node: Node, options: dict[str, Any], built: Any) -> WorkerHandle:
        addresses = [node.address for node in self._nodes]
        environ = worker_environment(os.environ, self.pool, index, addresses)
        if gpus_of(self.pool):
            environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray sets it
        log = None if self._log_dir is None else self._log_dir / f"worker_{index}.log"
        handle = start_worker(built, options, environ, log, (index, node.address))
        self._undo.callback(self._end, handle.actor)
        return handle

    def _end(self, actor: Any) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(actor)

    def _late(self, what: str, reason: str) -> str:
        limit = f"within {self._limit.seconds:g} s ({self._limit.setting})"
        hint = "`ray status` says what is in use there"
        return f"Ray at {self._address} did not {what} {limit}: {reason}; {hint}"


def _options(bundle: dict[str, float]) -> dict[str, Any]:
    """Return what a worker demands, by the names of an actor's options."""
    custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    return {
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "resources": custom,
    }
