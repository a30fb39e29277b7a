"""A Slurm job as its tasks see it: its allocation of nodes, and the attempts of its run.

A task identifies itself by its environment. Host names do not identify it, since several nodes of a
small cluster may share one. A run that was preempted, or that crashed in a way that may not happen
again, continues in its folder as a new attempt with logs of its own, `logs/attempt_<n>/`.
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from launcher.base import DamagedError, read_own, write_whole
from launcher.base.reading import read
from launcher.cluster.errors import ClusterError
from launcher.config.errors import ConfigError
from launcher.config.schema import Config

_LOOPBACK = "127.0.0.1"
PREEMPTED = 75  # the exit code of an attempt that asks to come back
_FILE = "attempt.json"
_KILLED = "killed"  # the exit reason of an attempt that recorded none


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
        ConfigError: the job has more nodes than the settings say, or fewer, and
            `cluster.wait_for_host` is off.
    """
    asked, left = config.cluster.hosts, len(allocation.nodes)
    if left > asked or (left < asked and not config.cluster.host_wait):
        raise ConfigError(
            f"cluster.hosts={asked}, but job {allocation.job_id} has {left} nodes",
            "Make cluster.hosts and sbatch's --nodes the same.",
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


# -- Attempts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """One start of a run.

    Attributes:
        number: the attempt's number, from 0.
        job_id: the id of its job.
        restarts: how often the job had been requeued by then.
        nodes: the names of the nodes on which it ran.
        exit_code: the exit code of the attempt; None while it runs.
        exit_reason: the `exit_reason` of its summary; None while it runs.
        step: the last step that it finished; None while it runs.
        from_step: the step after which it began; None if it ended before it knew.
    """

    number: int
    job_id: str
    restarts: int
    nodes: tuple[str, ...]
    exit_code: int | None = None
    exit_reason: str | None = None
    step: int | None = None
    from_step: int | None = None

    @property
    def key(self) -> tuple[str, int]:
        """The job's id and its restarts; see `Allocation.key`."""
        return self.job_id, self.restarts


def attempt_folder(run: Path, number: int) -> Path:
    """Return the folder with the logs of an attempt."""
    return run / "logs" / f"attempt_{number}"


def begin(
    run: Path,
    allocation: Allocation,
    last_step: int,
    from_step: int | None = None,
) -> Attempt:
    """Record the start of a new attempt; the caller holds the run's folder.

    Args:
        run: the run's folder.
        allocation: the allocation in which the attempt runs.
        last_step: the newest step that any attempt is known to have finished.
        from_step: the step after which this attempt continues.

    Raises:
        ClusterError: the two attempts before were killed without a message, both at `last_step`.
    """
    before = read_attempts(run)
    if before and before[-1].exit_reason is None:
        before[-1] = replace(before[-1], exit_code=1, exit_reason=_KILLED, step=last_step)
        _write(run, before[-1])
    if [(a.exit_reason, a.step) for a in before[-2:]] == [(_KILLED, last_step)] * 2:
        raise ClusterError(
            f"The run was killed twice at step {last_step} without a message of its own, so it is "
            "not started a third time. The job's output and "
            f"{attempt_folder(run, before[-1].number)} may show why; the usual reason is a lack of "
            "memory."
        )
    attempt = _new(run, allocation, from_step)
    _write(run, attempt)
    return attempt


def finish(run: Path, attempt: Attempt, code: int, reason: str, step: int) -> None:
    """Record how an attempt ended."""
    _write(run, replace(attempt, exit_code=code, exit_reason=reason, step=step))


def read_attempts(run: Path) -> list[Attempt]:
    """Return all attempts of a run so far, in their order.

    A damaged record is left out, with a warning.

    Raises:
        OSError: a record cannot be read.
    """
    found = [
        read_own(path / _FILE, functools.partial(_attempt, number))
        for number, path in sorted(_folders(run).items())
    ]
    return [attempt for attempt in found if attempt is not None]


def _folders(run: Path) -> dict[int, Path]:
    """Return the folders of the attempts, by number."""
    folders = (path for path in run.glob("logs/attempt_*") if path.is_dir())
    return {
        int(name[1]): path
        for path in folders
        if (name := re.fullmatch(r"attempt_(0|[1-9][0-9]{0,8})", path.name))
    }


def _attempt(number: int, tree: Any) -> Attempt:
    attempt = read(Attempt, tree)
    if attempt.number != number:
        raise DamagedError(f"number is {attempt.number} in the folder of attempt {number}")
    return attempt


def worth_retrying(attempts: Sequence[Attempt], allocation: Allocation) -> bool:
    """Return whether a run that has just failed should be requeued.

    It should not if its job was requeued often enough, or if the attempt before failed in the same
    way at the same step.
    """
    if allocation.restarts >= allocation.max_requeues:
        return False
    if not attempts or attempts[-1].key != allocation.key:
        return False  # it failed before it recorded an attempt
    *before, last = attempts
    return not before or (before[-1].exit_reason, before[-1].step) != (last.exit_reason, last.step)


def preempted_for_nothing(run: Path, allocation: Allocation) -> bool:
    """Return whether this start of the job and the one before it were preempted too early.

    Too early means before their first step; the next start would be, too. A start that is preempted
    before it recorded an attempt is recorded here.

    Raises:
        OSError: a record cannot be read or written.
    """
    attempts = read_attempts(run)
    if not attempts or attempts[-1].key != allocation.key:
        attempt = replace(_new(run, allocation), exit_code=PREEMPTED, exit_reason="preempted")
        _write(run, attempt)
        attempts.append(attempt)
    came_to = [(a.job_id, a.exit_code, a.step == a.from_step) for a in attempts[-2:]]
    return came_to == [(allocation.job_id, PREEMPTED, True)] * 2


def _new(run: Path, allocation: Allocation, from_step: int | None = None) -> Attempt:
    number = max(_folders(run), default=-1) + 1  # also counts attempts whose records are lost
    return Attempt(number, *allocation.key, allocation.nodes, from_step=from_step)


def _write(run: Path, attempt: Attempt) -> None:
    folder = attempt_folder(run, attempt.number)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / _FILE, json.dumps(asdict(attempt)) + "\n")
