"""Transfers of arrays between processes: the interface, and the transport for CPU buffers.

`PullTransport` is JAX's transfer server: arrays are offered under a key on one side and pulled by
that key on the other, in any order, in both directions at once, and only the two processes
concerned take part. It moves CPU buffers (a pull of 1 MB takes about a millisecond on loopback).
The server answers anyone who reaches its port and names a key, so it binds to one address, by
default this machine's own loopback, and the keys can start at a number that nobody can guess.
`runtime.permute` is the transport for GPUs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import jax
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from launcher.plan import PlanError
from launcher.runtime.programs.compat import told_by_all


@dataclass(frozen=True)
class Parcel:
    """An array that goes from one device to a device of another process.

    Attributes:
        src: the device that it comes from.
        dst: the device that it goes to.
        shape: its shape.
        dtype: its dtype.
        outlives: whether it is there after the step, so that the next one may donate it.
    """

    src: jax.Device
    dst: jax.Device
    shape: tuple[int, ...]
    dtype: Any
    outlives: bool = False


Parts = dict[int, jax.Array]  # by the number of their parcel
NOTHING: Mapping[str, int] = MappingProxyType({})


class Shipment(Protocol):
    """Parcels that go together, bound to this process.

    Attributes:
        description: what goes from where to where, and how; the same in all processes.
        is_open: whether all processes have opened such parcels, which changes in all together.
    """

    description: str

    @property
    def is_open(self) -> bool:
        """Whether all processes have opened such parcels."""
        ...

    def __call__(self, key: int, parts: Parts) -> Parts:
        """Send the parcels of this process and return those that arrive here.

        If the devices allow it, this returns at once, and the arrays are filled later.

        Args:
            key: the exchange's key.
            parts: the arrays to send, by the number of their parcel, each on the device that its
                parcel names.
        """


class Transport(Protocol):
    """The interface that the runtime needs to move arrays between processes.

    A process binds the exchanges in which it takes part. All processes that take part in one bind
    and call it alike, in one order; all processes open, pass barriers and reserve alike.
    """

    def bind(self, parcels: Sequence[Parcel]) -> Shipment:
        """Prepare an exchange."""

    def open(
        self,
        exchanges: Sequence[Shipment],
        order: str,
        together: Mapping[str, int] = NOTHING,
        by_all: bool = False,
    ) -> None:
        """Make exchanges ready to be called, then pass the `barrier`.

        Args:
            exchanges: those that this process takes part in.
            order: see `barrier`.
            together: see `barrier`.
            by_all: whether every process opens these very exchanges, those too that take no part.
        """

    def barrier(self, order: str, together: Mapping[str, int] = NOTHING) -> None:
        """Wait until every process has reached this barrier.

        Args:
            order: what all processes have to give alike; "" if this process failed.
            together: `runtime.order.digests`, each of which so many processes have to give.

        Raises:
            ProcessMismatchError: they do not.
        """

    def reserve(self, count: int) -> int:
        """Reserve new keys for `count` exchanges and return the first."""


class ProcessMismatchError(PlanError):
    """An error raised when the processes do not pass a barrier with the same order."""


class CheckedBarrier:
    """A base class of transports that implements `Transport.barrier`."""

    def __init__(self) -> None:
        self._passed = 0

    def barrier(self, order: str, together: Mapping[str, int] = NOTHING) -> None:
        """See `Transport`."""
        self._passed += 1
        own = json.dumps({**together, order: jax.process_count()})
        every = told_by_all(f"launcher/{type(self).__name__}/{self._passed}", own)
        given = Counter(each for told in every for each in json.loads(told).items())
        if any(found != wanted for (_, wanted), found in given.items()):
            raise ProcessMismatchError(
                "the processes would not run this plan alike: one of them failed, or has other "
                "code or other versions of the libraries"
            )


@contextmanager
def fail_together(transport: Transport | None) -> Iterator[None]:
    """Guard a block in which all processes compile.

    A process that fails in it also fails the others, so that they do not wait for it.
    """
    try:
        yield
    except ProcessMismatchError:
        raise
    except Exception:
        if transport is not None:
            with suppress(ProcessMismatchError):
                transport.barrier("")
        raise


class PullTransport(CheckedBarrier):
    """A transport by JAX's transfer server; see the module.

    Make one in each process, then give each of them all `addresses` by `connect`.
    """

    def __init__(self, bind: str = "127.0.0.1") -> None:
        super().__init__()
        client = jax.local_devices()[0].client
        self._server = transfer.start_transfer_server(client, f"{bind}:0", [f"{bind}:0"])
        self._peers: list[Any] = []
        self._first, self._reserved = 0, 0

    @property
    def address(self) -> str:
        """The address at which other processes reach this one."""
        return str(self._server.address())

    def connect(self, addresses: Sequence[str], first_key: int = 0) -> None:
        """Connect to every process.

        Args:
            addresses: the addresses of all processes, in the order of `jax.process_index()`.
            first_key: what all keys are counted from, the same in all processes.
        """
        me = jax.process_index()
        self._first = first_key
        self._peers = [
            None if i == me else self._server.connect(address)
            for i, address in enumerate(addresses)
        ]

    def bind(self, parcels: Sequence[Parcel]) -> Shipment:
        """See `Transport`."""
        return _Pulls(self, parcels)

    def open(
        self,
        exchanges: Sequence[Shipment],
        order: str,
        together: Mapping[str, int] = NOTHING,
        by_all: bool = False,
    ) -> None:
        """Pass the barrier; nothing has to be prepared. See `Transport`."""
        self.barrier(order, together)

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
