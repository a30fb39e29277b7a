"""Transfers of arrays between processes: the interface of transports, and their registry.

A transport is a file with a subclass of `Transport`, and a line in `TRANSPORTS`.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax

from launcher.base import TRANSPORTS
from launcher.base.jax_compat import all_gather_text
from launcher.plan import PlanError

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
        neighbours: the processes that can share memory with this one, itself among them, each with
            its number of the operating system; none on GPUs.
    """

    address: str | None = None

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._passed = 0
        self.neighbours: dict[int, int] = {}

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
            place = None  # where processes see one another in /proc: on Linux, mostly
            with suppress(OSError):
                boot = Path("/proc/sys/kernel/random/boot_id").read_text()
                place = [boot, os.readlink("/proc/self/ns/pid"), os.getuid()]
            told = self.barrier("connect", about=[place, os.getpid()])
            near = {i: pid for i, (where, pid) in enumerate(told) if where == place is not None}
            if len({str(where) for where, _ in told}) < len(told):  # some are on one machine
                see = [os.path.exists(f"/proc/{pid}/root") for pid in near.values()]  # as its files
                seen = self.barrier("neighbours", about=all(see))
                near = near if all(seen[i] for i in near) else {}
            self.neighbours = near

    def bind(self, parcels: Sequence[Parcel]) -> Shipment:
        """Prepare an exchange."""
        raise NotImplementedError

    def open(
        self,
        exchanges: Sequence[Shipment],
        order: str,
        together: Mapping[str, int] | None = None,
        by_all: bool = False,
        about: Any = None,
    ) -> list[Any]:
        """Make exchanges ready to be called, then pass the `barrier`; return what that does.

        Args:
            exchanges: those that this process takes part in.
            order: see `barrier`.
            together: see `barrier`.
            by_all: whether every process opens these very exchanges, those too that take no part.
            about: see `barrier`.
        """
        return self.barrier(order, together, about)

    def barrier(
        self, order: str, together: Mapping[str, int] | None = None, about: Any = None
    ) -> list[Any]:
        """Wait until every process has reached this barrier; return what each says.

        Args:
            order: a digest that must be the same in all processes; "" if this process failed.
            together: see `digests`: by digest, the number of processes that must give it.
            about: what this one says, JSON-able.

        Raises:
            ProcessMismatchError: they do not.
        """
        self._passed += 1
        own = json.dumps([{**(together or {}), order: jax.process_count()}, about])
        name = f"launcher/{type(self).__name__}/{self._passed}"
        every = list(map(json.loads, all_gather_text(name, own)))
        given = Counter(each for digests, _ in every for each in digests.items())
        if any(count != wanted for (_, wanted), count in given.items()):
            raise ProcessMismatchError(
                "the processes would not run this plan alike: one of them failed, or has other "
                "code or other versions of the libraries"
            )
        return [said for _, said in every]

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
