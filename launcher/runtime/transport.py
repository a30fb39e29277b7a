"""Moving arrays between processes: what the runtime needs of a way, and the one for CPU buffers.

`PullTransport` is JAX's transfer server: arrays are offered under a key on one side and pulled by
it on the other, in any order, in both directions at once, and only the two processes concerned take
part. It moves CPU buffers (a pull of 1 MB takes about a millisecond on loopback). The server
answers whoever reaches its port and names a key, so it binds to one address, by default this
machine's own loopback, and the keys can start at a number that nobody guesses. `runtime.permute` is
the way for GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from launcher.plan import PlanError
from launcher.runtime.compat import agree


@dataclass(frozen=True)
class Parcel:
    """An array that goes from a device to one of another process."""

    src: jax.Device
    dst: jax.Device
    shape: tuple[int, ...]
    dtype: Any


Parts = dict[int, jax.Array]  # by the number of their parcel


class Exchange(Protocol):
    """Parcels that go together, bound to this process.

    Attributes:
        num_keys: how many keys they take.
        told: what goes from where to where, and how; the same in all processes.
        is_open: whether it can be called, which changes in all processes together.
    """

    num_keys: int
    told: str

    @property
    def is_open(self) -> bool: ...

    def __call__(self, key: int, parts: Parts) -> Parts:
        """Send the arrays that lie here, each on the device that its parcel names; those that
        arrive here. Returns at once where the devices allow it; they are filled later."""


class Transport(Protocol):
    """What the runtime needs of a way between processes. All processes bind, open and call alike:
    the same things in the same order, also those that other processes exchange."""

    def bind(self, parcels: Sequence[Parcel]) -> Exchange:
        """Prepare an exchange."""

    def open(self, exchanges: Sequence[Exchange], order: str) -> None:
        """Make exchanges ready to be called, and `meet` with the `order` that they are part of."""

    def meet(self, order: str) -> None:
        """Wait until every process has come here. Raises NotMetError where they do not all follow
        this `order`, as `runtime.order` tells it; "": this one failed."""

    def reserve(self, count: int) -> int:
        """The first of so many new keys, of which each is used once."""


class NotMetError(PlanError):
    """The processes do not come together to run a plan."""


class Meeting:
    """`Transport.meet`."""

    def __init__(self) -> None:
        self._met = 0

    def meet(self, order: str) -> None:
        """See `Transport`."""
        self._met += 1
        if not agree(f"launcher/{type(self).__name__}/{self._met}", order):
            raise NotMetError(
                "the processes would not run this plan alike: one of them failed, or has other "
                "code or other versions of the libraries"
            )


@contextmanager
def met_by_all(transport: Transport | None) -> Iterator[None]:
    """In which processes compile: where this one fails, the others are told and do not wait."""
    try:
        yield
    except NotMetError:
        raise
    except Exception:
        if transport is not None:
            with suppress(NotMetError):
                transport.meet("")
        raise


class PullTransport(Meeting):
    """See the module. Make one in each process, then tell each all `addresses` by `connect`."""

    def __init__(self, bind: str = "127.0.0.1") -> None:
        super().__init__()
        client = jax.local_devices()[0].client
        self._server = transfer.start_transfer_server(client, f"{bind}:0", [f"{bind}:0"])
        self._peers: list[Any] = []
        self._reserved = 0

    @property
    def address(self) -> str:
        """Where other processes reach this one."""
        return str(self._server.address())

    def connect(self, addresses: Sequence[str], first_key: int = 0) -> None:
        """Connect to every process; `addresses` are in the order of `jax.process_index()`. The
        first key that is reserved, the same in all of them, is `first_key`."""
        me = jax.process_index()
        self._reserved = first_key
        self._peers = [
            None if i == me else self._server.connect(address)
            for i, address in enumerate(addresses)
        ]

    def bind(self, parcels: Sequence[Parcel]) -> Exchange:
        """See `Transport`."""
        return _Pulls(self, parcels)

    def open(self, exchanges: Sequence[Exchange], order: str) -> None:
        """See `Transport`. Nothing is to be made ready."""
        self.meet(order)

    def reserve(self, count: int) -> int:
        """See `Transport`."""
        self._reserved += count
        return self._reserved - count

    def send(self, key: int, arrays: list[jax.Array]) -> None:
        """Offer arrays of this process under a key that is used once; returns at once."""
        self._server.await_pull(key, arrays)

    def recv(self, key: int, process: int, like: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """The arrays that `process` offers under `key`, with these shapes and shardings; returns
        at once, the arrays are filled later."""
        return list(self._peers[process].pull(key, like))


class _Pulls:
    """An exchange by keys: all parcels from one process to another are one message under one."""

    is_open = True

    def __init__(self, transport: PullTransport, parcels: Sequence[Parcel]) -> None:
        self._transport = transport
        links: dict[tuple[int, int], list[int]] = {}
        for n, parcel in enumerate(parcels):
            link = parcel.src.process_index, parcel.dst.process_index
            links.setdefault(link, []).append(n)
        self.num_keys = len(links)
        self.told = repr(
            [(link, [str(parcels[n]) for n in found]) for link, found in links.items()]
        )
        me, numbered = jax.process_index(), list(enumerate(links.items()))
        self._out = [(key, found) for key, ((a, _), found) in numbered if a == me]
        self._in = [
            (key, a, found, [_like(parcels[n]) for n in found])
            for key, ((a, b), found) in numbered
            if b == me
        ]

    def __call__(self, key: int, parts: Parts) -> Parts:
        for at, found in self._out:
            self._transport.send(key + at, [parts[n] for n in found])
        arrived: Parts = {}
        for at, process, found, like in self._in:
            arrays = self._transport.recv(key + at, process, like)
            arrived.update(zip(found, arrays, strict=True))
        return arrived


def _like(parcel: Parcel) -> jax.ShapeDtypeStruct:
    """What arrives of a parcel."""
    where = SingleDeviceSharding(parcel.dst)
    return jax.ShapeDtypeStruct(parcel.shape, parcel.dtype, sharding=where)
