"""Let the tasks of a job meet, by a file in the run folder and a socket.

The first task, the driver, listens from its start on. The file contains the address and the secret
that opens Ray, so only its user may read it, and one of another user's is not believed. Every other
task connects and waits. Once Ray is up, the driver's head answers each of them with Ray's address.
Both prove that they know the secret without sending it (see `head`). When the connection ends, for
whatever reason, the task ends its part of Ray and connects again for the driver's next start, or
ends if nobody listens any more.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launcher.base import DamagedError, parse_json, read_private, write_whole
from launcher.base.reading import read
from launcher.cluster.errors import ClusterError
from launcher.cluster.ray.head import proof
from launcher.cluster.slurm.allocation import Allocation, own_address
from launcher.config.cluster import Slurm

_POLL_SECONDS = 0.5
_ANSWER_BYTES = 2**16
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # seconds, and how often
_AGAIN_SECONDS = 120.0  # enough for a healthy node to join again


@dataclass(frozen=True)
class Rendezvous:
    """The driver's side of a rendezvous.

    Attributes:
        allocation: the nodes that are expected.
        address: the address of this node.
        listener: the socket on which the other tasks wait.
        timeout: the seconds to wait for one more node.
    """

    allocation: Allocation
    address: str
    listener: socket.socket
    timeout: float


@dataclass(frozen=True)
class _Where:
    """The content of the file: where the driver listens, and the secret."""

    address: tuple[str, int]
    token: str


@dataclass(frozen=True)
class Answer:
    """The answer of the driver's head once Ray is up.

    Attributes:
        ray: Ray's address.
        logs: the folder for logs.
    """

    ray: str
    logs: str


@contextmanager
def open_rendezvous(
    folder: Path, allocation: Allocation, slurm: Slurm, token: str
) -> Iterator[Rendezvous]:
    """Open the rendezvous of a job in its run's folder, for as long as the context lasts.

    Raises:
        ClusterError: this node has no route to the others.
        OSError: the file cannot be written.
    """
    address = own_address(allocation, slurm.network_interface)
    path = _path(folder, allocation)
    for left in folder.glob(f".rendezvous-{allocation.job_id}.*"):
        left.unlink(missing_ok=True)  # left by a start that was killed
    with socket.create_server((address, 0), backlog=4096) as listener:
        where = asdict(_Where(listener.getsockname(), token))
        write_whole(path, json.dumps(where), private=True)
        try:
            yield Rendezvous(allocation, address, listener, slurm.start_timeout)
        finally:
            path.unlink(missing_ok=True)


def reopened(rendezvous: Rendezvous) -> Rendezvous:
    """Return the same rendezvous for a further start, which waits less for a lost node."""
    return replace(rendezvous, timeout=min(rendezvous.timeout, _AGAIN_SECONDS))


def release_nodes(rendezvous: Rendezvous) -> None:
    """Let the other tasks connect and end, if there is nothing for them to do.

    Otherwise they would wait for a driver that has ended.
    """
    rendezvous.listener.settimeout(rendezvous.timeout)
    with suppress(OSError):
        for _ in rendezvous.allocation.nodes[1:]:
            rendezvous.listener.accept()[0].close()


def join(folder: Path, allocation: Allocation, slurm: Slurm) -> tuple[socket.socket, str]:
    """Wait for the driver and connect to it.

    Returns:
        The connection, and the secret that opens Ray.

    Raises:
        ClusterError: there is no driver within `slurm.start_timeout` seconds.
    """
    path, problem = _path(folder, allocation), ""
    deadline = time.monotonic() + slurm.start_timeout
    while time.monotonic() < deadline:
        # Listed, not opened: a network file system caches for a while that a file was missing.
        try:
            if path.name in os.listdir(folder):
                where = _read(path)
                return _connect(where), where.token
        except (OSError, DamagedError) as error:
            problem = f" ({error})"
        time.sleep(_POLL_SECONDS)
    raise ClusterError(
        f"{allocation.node} waited {slurm.start_timeout} s for the driver on "
        f"{allocation.nodes[0]}: {path} did not appear, or nobody answered{problem}. "
        "Is run.dir on a file system that all nodes share? Raise cluster.slurm.start_timeout "
        "if nodes are slow to start."
    )


def rejoin(folder: Path, allocation: Allocation) -> socket.socket | None:
    """Connect for the driver's next start; return None if the driver has ended."""
    with suppress(OSError, DamagedError):
        return _connect(_read(_path(folder, allocation)))
    return None


def ask(connection: socket.socket, token: str) -> Answer | None:
    """Wait for the answer of the driver's head.

    Returns:
        The answer, or None if the connection ends before all of it is there: the driver ended, and
            has said why, or starts again.

    Raises:
        ClusterError: somebody else answers.
    """
    nonce, secret = secrets.token_hex(16).encode(), token.encode()
    connection.settimeout(None)
    try:
        connection.sendall(nonce + b" " + proof(secret, b"task", nonce))
        with connection.makefile("rb") as lines:
            line = lines.readline(_ANSWER_BYTES)
    except ConnectionError:
        return None
    if not line.endswith(b"\n") and len(line) < _ANSWER_BYTES:
        return None
    given, _, body = line.rstrip(b"\n").partition(b" ")
    if not hmac.compare_digest(given, proof(secret, b"driver", nonce, body)):
        raise ClusterError("The process that answers as the driver does not know the run's secret.")
    return read(Answer, parse_json(body))


def _read(path: Path) -> _Where:
    return read(_Where, parse_json(read_private(path)))


def _connect(where: _Where) -> socket.socket:
    """Return a connection whose end is noticed even if the driver's machine loses its power."""
    connection = socket.create_connection(where.address, timeout=30)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):  # the system's default is two hours
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


def _path(folder: Path, allocation: Allocation) -> Path:
    return folder / f".rendezvous-{allocation.job_id}.{allocation.restarts}"
