"""Moving arrays between processes: offered under a key on one side, pulled by it on the other.

`PullTransport` is JAX's transfer server: any order, both directions at once, and only the two
processes concerned take part. It moves CPU buffers (a pull of 1 MB takes about a millisecond on
loopback). The server answers whoever reaches its port, so it binds to one address, by default
this machine's own loopback. Used by `runtime.transfer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.experimental import transfer


class Transport(Protocol):
    """What the runtime needs of a way between processes."""

    def reserve(self, count: int) -> int:
        """The first of so many new keys, the same in every process that reserves in this order."""

    def send(self, key: int, arrays: list[jax.Array]) -> None:
        """Offer arrays of this process under a key that is used once; returns at once."""

    def recv(self, key: int, process: int, like: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """The arrays that `process` offers under `key`, with these shapes and shardings; returns
        at once, the arrays are filled later."""


class PullTransport:
    """See the module. Make one in each process, then tell each all `addresses` by `connect`."""

    def __init__(self, bind: str = "127.0.0.1") -> None:
        client = jax.local_devices()[0].client
        self._server = transfer.start_transfer_server(client, f"{bind}:0", [f"{bind}:0"])
        self._peers: list[Any] = []
        self._reserved = 0

    def reserve(self, count: int) -> int:
        """See `Transport`."""
        self._reserved += count
        return self._reserved - count

    @property
    def address(self) -> str:
        """Where other processes reach this one."""
        return str(self._server.address())

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to every process; `addresses` are in the order of `jax.process_index()`."""
        me = jax.process_index()
        self._peers = [
            None if i == me else self._server.connect(address)
            for i, address in enumerate(addresses)
        ]

    def send(self, key: int, arrays: list[jax.Array]) -> None:
        """See `Transport`."""
        self._server.await_pull(key, arrays)

    def recv(self, key: int, process: int, like: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """See `Transport`."""
        return list(self._peers[process].pull(key, like))
