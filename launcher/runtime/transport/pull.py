"""Transfer CPU buffers between processes, by JAX's transfer server.

Arrays are offered under a key on one side and pulled by that key on the other, in any order, in
both directions at once, and only the two processes concerned take part. A pull of 1 MB takes about
a millisecond on loopback. The server answers anyone who reaches its port and names a key, so it
binds to one address, by default this machine's own loopback, and the keys can start at a number
that nobody can guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from launcher.runtime.transport.transport import Parcel, Parts, Shipment, Transport


class PullTransport(Transport):
    """A transport by JAX's transfer server; see the module.

    Make one in each process, then give each of them all `addresses` by `connect`.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__(host)
        client = jax.local_devices()[0].client
        self._server = transfer.start_transfer_server(client, f"{host}:0", [f"{host}:0"])
        self.address = str(self._server.address())
        self._peers: list[Any] = []
        self._first, self._reserved = 0, 0

    @classmethod
    def suits(cls, platform: str) -> bool:
        """See `Transport`."""
        return platform == "cpu"

    def connect(self, addresses: Sequence[Any], first_key: int = 0) -> None:
        """See `Transport`."""
        super().connect(addresses, first_key)
        me = jax.process_index()
        self._first = first_key
        self._peers = [
            None if i == me else self._server.connect(address)
            for i, address in enumerate(addresses)
        ]

    def bind(self, parcels: Sequence[Parcel]) -> Shipment:
        """See `Transport`."""
        return _Pulls(self, parcels)

    def reserve(self, count: int) -> int:
        """See `Transport`."""
        self._reserved += count
        return self._reserved - count

    def send(self, key: int, process: int, arrays: list[jax.Array]) -> None:
        """Offer a process arrays of this one, those of one exchange; return at once.

        Args:
            key: the exchange's key.
            process: the process that gets them.
            arrays: the arrays.
        """
        self._server.await_pull(self._offered(key, process), arrays)

    def recv(self, key: int, process: int, like: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Return the arrays that a process offers this one; they are filled later.

        This returns at once.

        Args:
            key: the exchange's key.
            process: the process that offers them.
            like: the shapes and shardings of the arrays.
        """
        return list(self._peers[process].pull(self._offered(key, jax.process_index()), like))

    def _offered(self, key: int, process: int) -> int:
        """Return the server's own key, which is used once, of what a process gets."""
        return self._first + key * len(self._peers) + process


class _Pulls:
    """An exchange by keys: all parcels from one process to another go in one message."""

    is_open = True

    def __init__(self, transport: PullTransport, parcels: Sequence[Parcel]) -> None:
        self._transport = transport
        links: dict[tuple[int, int], list[int]] = {}
        for n, parcel in enumerate(parcels):
            link = parcel.src.process_index, parcel.dst.process_index
            links.setdefault(link, []).append(n)
        self.description = repr(
            [(link, [str(parcels[n]) for n in found]) for link, found in links.items()]
        )
        me = jax.process_index()
        self._out = [(b, found) for (a, b), found in links.items() if a == me]
        # An array is read when it is pulled, and a step may be called that donates it before that.
        self._copied = {n for n, parcel in enumerate(parcels) if parcel.outlives}
        self._in = [
            (a, found, [_like(parcels[n]) for n in found])
            for (a, b), found in links.items()
            if b == me
        ]

    def __call__(self, key: int, parts: Parts) -> Parts:
        for process, found in self._out:
            offered = [parts[n].copy() if n in self._copied else parts[n] for n in found]
            self._transport.send(key, process, offered)
        arrived: Parts = {}
        for process, found, like in self._in:
            arrays = self._transport.recv(key, process, like)
            arrived.update(zip(found, arrays, strict=True))
        return arrived


def _like(parcel: Parcel) -> jax.ShapeDtypeStruct:
    """Return the shape and the device of a parcel as it arrives."""
    where = SingleDeviceSharding(parcel.dst)
    return jax.ShapeDtypeStruct(parcel.shape, parcel.dtype, sharding=where)
