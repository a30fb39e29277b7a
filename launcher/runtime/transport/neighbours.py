"""Connect the processes of one machine to one another, and give them memory in common.

There is a UNIX socket between each two. It tells what memory cannot: when all have come so far,
without a process that polls on a core that another one needs; and that a process has ended, however
it ended. The memory has no name that others could open or that a killed process could leave behind:
its descriptor crosses a socket, and it is gone with the last process that holds it. Linux only.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_SECONDS = 60.0  # for the others to connect, once all know the address
_INDEX, _CREDENTIALS = struct.Struct("=I"), struct.Struct("3i")  # struct ucred: pid, uid, gid

Neighbours = Mapping[int, socket.socket]  # by the number of the process that it leads to


class EndedError(ConnectionError):
    """An error raised when a process of the run has ended, or cannot go on."""


def find_neighbours(me: int, gather: Callable[[str], list[str]]) -> Neighbours:
    """Connect to the other processes of this user on this machine; all processes call it together.

    Args:
        me: the number of this process.
        gather: returns a text of every process, in their order, given this one's.

    Raises:
        OSError: they cannot be reached.
    """
    if sys.platform != "linux":
        return {}
    with socket.socket(socket.AF_UNIX) as listener:
        name = secrets.token_hex(16)
        listener.bind(f"\0launcher-{name}")  # gone with the socket
        listener.listen()
        listener.settimeout(_SECONDS)
        told = [json.loads(text) for text in gather(json.dumps([_place(), name]))]
        here = [i for i, (place, _) in enumerate(told) if place == told[me][0] and i != me]
        found = {i: _connected(told[i][1], me) for i in here if i < me}
        while len(found) < len(here):
            peer, _ = listener.accept()
            if _is_mine(peer):
                (index,) = _INDEX.unpack(peer.recv(_INDEX.size))
                found[index] = peer
    return found


def _place() -> str:
    """Return what processes have in common whose sockets reach one another."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}"


def _connected(name: str, me: int) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(f"\0launcher-{name}")
    peer.sendall(_INDEX.pack(me))
    return peer


def _is_mine(peer: socket.socket) -> bool:
    """Return whether a process of this user is at the other end: all users see the address."""
    told = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(told)[1] == os.getuid())


class Circle:
    """Processes of one machine that do something together, this one among them.

    Args:
        me: the number of this process.
        members: the numbers of all.
        neighbours: the sockets to those of this machine.

    Attributes:
        rank: the place of this process among the members.
        count: the number of members.
    """

    def __init__(self, me: int, members: Iterable[int], neighbours: Neighbours) -> None:
        order = sorted(members)
        self.rank, self.count = order.index(me), len(order)
        self._peers = {i: neighbours[i] for i in order if i != me}

    def meet(self) -> None:
        """Wait until all have come here; all call it in the same order.

        Raises:
            EndedError: one of them has ended.
        """
        for index, peer in self._peers.items():
            with _naming(index):
                peer.sendall(b".")
        for index, peer in self._peers.items():
            with _naming(index):
                if not peer.recv(1):
                    raise ConnectionResetError

    def memory(self, size: int) -> mmap.mmap:
        """Return new memory that all have in common, filled with zeros; all call it alike.

        Raises:
            EndedError: one of them has ended, or found no memory.
            OSError: there is no memory.
        """
        if self.rank:
            first, peer = next(iter(self._peers.items()))
            with _naming(first):
                given = socket.recv_fds(peer, 1, 1)[1]
                if not given:
                    raise ConnectionResetError
            return _mapped(given[0], size)
        given = []
        try:
            made = os.memfd_create("launcher")
            os.ftruncate(made, size)  # pages are taken when they are written
            given = [made]
        finally:  # nobody waits for what there is not
            for index, peer in self._peers.items():
                with _naming(index):
                    socket.send_fds(peer, [b"."], given)
        return _mapped(made, size)


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


@contextmanager
def _naming(index: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EndedError(
            f"process {index} of this run has ended, or cannot go on, in the middle of what this "
            "one does with it; its own log says why"
        ) from error
