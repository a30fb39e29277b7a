"""Transfers of arrays between processes: the interface of transports, and their registry.

A transport is a file with a subclass of `Transport`, and a line in `TRANSPORTS`.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from launcher.base import TRANSPORTS
from launcher.base.jax_compat import all_gather_text
from launcher.plan import PlanError
from launcher.runtime.transport.neighbours import Neighbours, find_neighbours

_log = logging.getLogger(__name__)


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


class ProcessMismatchError(PlanError):
    """An error raised when the processes do not pass a barrier with the same order."""


class Transport:
    """Base class of what moves arrays between processes; `TRANSPORTS` lists its subclasses.

    A process binds the exchanges in which it takes part. All processes that take part in one bind
    and call it alike, in one order; all processes open, pass barriers and reserve alike.

    Args:
        host: the address of this machine at which others may reach the process.

    Attributes:
        address: the address from which others get arrays; None if they need none.
        neighbours: the sockets to the processes that can share memory with this one: on CPUs, those
            of its machine.
    """

    address: str | None = None

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._passed = 0
        self.neighbours: Neighbours = {}

    @classmethod
    def suits(cls, platform: str) -> bool:
        """Return whether `auto` may choose it on a platform, as JAX names it."""
        return True

    def connect(self, addresses: Sequence[Any], first_key: int = 0) -> None:
        """Connect to every process.

        Args:
            addresses: the addresses of all processes, in the order of `jax.process_index()`.
            first_key: what all keys are counted from, the same in all processes.
        """
        if jax.local_devices()[0].platform == "cpu":
            self.neighbours = find_neighbours(jax.process_index(), self._gathered)

    def bind(self, parcels: Sequence[Parcel]) -> Shipment:
        """Prepare an exchange."""
        raise NotImplementedError

    def open(
        self,
        exchanges: Sequence[Shipment],
        order: str,
        together: Mapping[str, int] | None = None,
        by_all: bool = False,
    ) -> None:
        """Make exchanges ready to be called, then pass the `barrier`.

        Args:
            exchanges: those that this process takes part in.
            order: see `barrier`.
            together: see `barrier`.
            by_all: whether every process opens these very exchanges, those too that take no part.
        """
        self.barrier(order, together)

    def barrier(self, order: str, together: Mapping[str, int] | None = None) -> None:
        """Wait until every process has reached this barrier.

        Args:
            order: a digest that must be the same in all processes; "" if this process failed.
            together: see `digests`: by digest, the number of processes that must give it.

        Raises:
            ProcessMismatchError: they do not.
        """
        own = json.dumps({**(together or {}), order: jax.process_count()})
        every = self._gathered(own)
        given = Counter(each for text in every for each in json.loads(text).items())
        if any(count != wanted for (_, wanted), count in given.items()):
            raise ProcessMismatchError(
                "the processes would not run this plan alike: one of them failed, or has other "
                "code or other versions of the libraries"
            )

    def _gathered(self, own: str) -> list[str]:
        """Return the texts of all processes, which call it alike."""
        self._passed += 1
        return all_gather_text(f"launcher/{type(self).__name__}/{self._passed}", own)

    def reserve(self, count: int) -> int:
        """Reserve new keys for `count` exchanges and return the first; 0 where there are none."""
        return 0


@contextmanager
def fail_together(transport: Transport | None) -> Iterator[None]:
    """Guard a block in which all processes compile: if one fails in it, all fail."""
    try:
        yield
    except ProcessMismatchError:
        raise
    except Exception:
        if transport is not None:
            with suppress(ProcessMismatchError):
                transport.barrier("")
        raise


def make_transport(name: str, host: str) -> Transport:
    """Make a transport of this process, once its devices are known.

    Args:
        name: its name in `TRANSPORTS`, or "auto": the first that suits the devices.
        host: see `Transport`.
    """
    platform = jax.local_devices()[0].platform
    for each, path in TRANSPORTS.items():
        if name in (each, "auto"):
            module, _, attribute = path.partition(":")
            kind: type[Transport] = getattr(importlib.import_module(module), attribute)
            if name == each or kind.suits(platform):
                _log.info(f"arrays go between processes by cluster.transport={each}")
                return kind(host)
    raise ValueError(f"no transport {name} for {platform}; there are {', '.join(TRANSPORTS)}")
