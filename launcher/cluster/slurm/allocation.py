"""Read the allocation of a Slurm job from the environment of one of its tasks.

A task identifies itself by its environment. Host names do not identify it, since several nodes of a
small cluster may share one.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace

import psutil

from launcher.cluster.errors import ClusterError
from launcher.config.errors import ConfigError
from launcher.config.schema import Config

_LOOPBACK = "127.0.0.1"
# Above Ray's default for workers, below what kernels hand out to outgoing connections.
_FIRST_PORT, _PORTS, _PORTS_OF_A_JOB = 20000, 12000, 16


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job, and the one on which this task runs.

    Attributes:
        job_id: the job's own id, also for an element of a job array.
        restarts: how often the job was requeued.
        max_requeues: how often the script lets it be requeued.
        nodes: the names of the nodes, in Slurm's order.
        index: the index of this task's node among them; the first one drives the run.
    """

    job_id: str
    restarts: int
    max_requeues: int
    nodes: tuple[str, ...]
    index: int

    @property
    def node(self) -> str:
        """The name of this task's node."""
        return self.nodes[self.index]

    @property
    def key(self) -> tuple[str, int]:
        """The job's id and its restarts, which together identify one start of one job."""
        return self.job_id, self.restarts


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation that this process belongs to, or None outside of one.

    A shell in an interactive job is outside: only our batch script starts tasks.
    """
    if "LAUNCHER_NODES" not in environ or "SLURM_NODEID" not in environ:
        return None
    return Allocation(
        job_id=environ["SLURM_JOB_ID"],
        restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
        max_requeues=int(environ.get("LAUNCHER_MAX_REQUEUES", "0")),
        nodes=tuple(environ["LAUNCHER_NODES"].split()),
        index=int(environ["SLURM_NODEID"]),
    )


def settled(config: Config, allocation: Allocation) -> Config:
    """Return `config` as every start of the job reads it: a run without an id gets the job's.

    Raises:
        ConfigError: the job has another number of nodes than the settings say.
    """
    if len(allocation.nodes) != config.cluster.hosts:
        raise ConfigError(
            f"cluster.hosts={config.cluster.hosts}, but job {allocation.job_id} has "
            f"{len(allocation.nodes)} nodes",
            "Make cluster.hosts and sbatch's --nodes the same.",
            ["cluster.hosts"],
        )
    run_id = config.run.id or f"{config.model.name}-job-{allocation.job_id}"
    return replace(config, run=replace(config.run, id=run_id))


def own_address(allocation: Allocation, interface: str | None, peer: str | None = None) -> str:
    """Return the address by which the other nodes reach this one.

    Args:
        allocation: the nodes of the job.
        interface: the network interface to take it from; None takes the one that leads to another
            node.
        peer: the address of another node; None asks Slurm for one.

    Raises:
        ClusterError: there is no such interface, or no route to another node.
    """
    if interface is not None:
        return _interface_address(interface)
    if len(allocation.nodes) == 1:
        return _LOOPBACK
    other = next(node for node in allocation.nodes if node != allocation.node)
    try:
        # Never this node's own name: on many machines it resolves to a loopback address.
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as route:
            route.connect((peer or _node_address(other), 9))  # sends nothing
            return str(route.getsockname()[0])
    except OSError as error:
        raise ClusterError(
            f"{allocation.node} finds no way to {other}: {error}. "
            "Set cluster.slurm.network_interface to the interface that leads to the other nodes."
        ) from None


def listen(job_id: str, address: str) -> socket.socket:
    """Return a socket that listens on the first free port of a range that the job's id selects.

    Raises:
        ClusterError: none of the ports is free.
    """
    number = int("".join(filter(str.isdigit, job_id)) or "0")
    for k in range(_PORTS):
        port = _FIRST_PORT + (number * _PORTS_OF_A_JOB + k) % _PORTS
        listener = socket.socket()
        try:
            listener.bind((address, port))
            listener.listen(4096)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
    raise ClusterError(f"No port from {_FIRST_PORT} to {_FIRST_PORT + _PORTS} is free on {address}")


def _interface_address(interface: str) -> str:
    interfaces = psutil.net_if_addrs()
    found = [a.address for a in interfaces.get(interface, ()) if a.family == socket.AF_INET]
    if not found:
        raise ClusterError(
            f"cluster.slurm.network_interface={interface} has no IPv4 address on "
            f"{os.environ.get('SLURMD_NODENAME', 'this node')}, which has: {', '.join(interfaces)}"
        )
    return str(found[0])


def _node_address(node: str) -> str:
    """Return the address of a node, or its name if Slurm cannot be asked (in a container)."""
    command = ["scontrol", "--oneliner", "show", "node", node]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return node
    fields = dict(word.partition("=")[::2] for word in result.stdout.split())
    return fields.get("NodeAddr", node)
