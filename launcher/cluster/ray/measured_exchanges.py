"""A worker that measures what exchanges through parameter servers cost; it imports no JAX."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from launcher.cluster.ray.server_client import ServerClient

_SMALL, _LARGE = 1 << 8, 1 << 22  # float32 numbers of a part: 1 KiB and 16 MiB
_ROUNDS = 30


class ExchangeRates(NamedTuple):
    """What Ray's object store and a server's sums cost, with all workers at work.

    Attributes:
        latency: seconds of an exchange of a small array, from put to get.
        put: bytes/s that a worker packs and writes to the store.
        add: bytes/s of parts that a server adds; it counts all of them, and the writing of the sum.
        get: bytes/s that a worker copies out of the store.
    """

    latency: float
    put: float
    add: float
    get: float


@dataclass(frozen=True)
class _Spec:
    """As much of an `ExchangeSpec` as a client reads: one server, a sum."""

    name: str = "measurement"
    kind: str = "sum"
    server: int = 0


class ExchangeMeter:
    """A worker that exchanges arrays of zeros with one server, and keeps the time."""

    def meet(
        self, count: int, index: int, servers: Sequence[tuple[Any, str]], seconds: float
    ) -> None:
        """See `Peer.meet`."""
        self._servers = ServerClient(index, count, servers, seconds)
        self._servers.open([_Spec()])  # type: ignore[list-item]

    def measure(self) -> ExchangeRates:
        """Return the rates of the fastest rounds, so that other work on the machine counts little.

        All workers call it together.
        """
        small = [self._round(_SMALL) for _ in range(_ROUNDS)]
        large = [self._round(_LARGE) for _ in range(_ROUNDS)]
        latency = min(put + wait for put, wait, _ in small)
        put, wait, get = (min(times) for times in zip(*large, strict=True))
        size = 4.0 * _LARGE
        adding = max(wait - latency, latency)
        return ExchangeRates(latency, size / put, size * self._servers.count / adding, size / get)

    def _round(self, size: int) -> tuple[float, float, float]:
        """Exchange so many numbers; return the seconds of putting, waiting and reading."""
        gradients, call = [np.zeros(size // 2, np.float32)] * 2, self._servers.reserve()
        began = time.perf_counter()
        part = np.concatenate(gradients)
        self._servers.put(call, 0, part)
        given = time.perf_counter()
        whole = self._servers.get(call, 0)
        there = time.perf_counter()
        np.copyto(part, whole)
        return given - began, there - given, time.perf_counter() - there
