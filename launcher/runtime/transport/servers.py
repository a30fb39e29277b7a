"""Exchanges of a worker with its parameter servers.

Each worker is a JAX of its own; arrays cross between workers through servers alone. A thread
carries out one exchange: it waits until the arrays are computed, packs them on the host, gives the
servers this worker's part, waits for the whole and places it on the devices. The caller waits for
all of them.
"""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from launcher.base import SpanRecorder
from launcher.runtime.emit.instructions import Exchange, ExchangeSpec
from launcher.runtime.programs.device_meshes import DeviceMeshes
from launcher.runtime.transport.transfer import plain_aval

THREADS = 8  # exchanges that are under way at once; every worker begins with the same


class Servers(Protocol):
    """The parameter servers, as one worker sees them; `launcher.cluster` implements it, over Ray.

    Attributes:
        rank: this worker's number.
        count: the number of workers.
    """

    rank: int
    count: int

    def open(self, exchanges: Sequence[ExchangeSpec]) -> int:
        """Make the exchanges of one executable known, before its first call.

        All workers open the same exchanges in the same order.

        Returns:
            The number of the first, which no earlier one has; the others follow.
        """

    def reserve(self) -> int:
        """Return the number of a new call, the same in all workers, since all call alike."""

    def put(self, call: int, exchange: int, part: np.ndarray) -> None:
        """Give this worker's part of an exchange. Any thread may call it, and alone waits.

        Args:
            call: the number of the call.
            exchange: the exchange's number.
            part: has the exchange's shape and dtype, and is not written to afterwards.
        """

    def get(self, call: int, exchange: int) -> np.ndarray:
        """Wait for the whole of an exchange and return it, read-only. Any thread may call it.

        Raises:
            Exception: a server or a worker is gone, or the wait is over the step's timeout; the
                message names who.
        """


class Exchanging:
    """An exchange that is called with the number of the step's call and with the arrays.

    Args:
        x: the instruction.
        placement: where its slots live.
        servers: the parameter servers.
        pool: the threads of the executable.
        spans: takes when each thread did what, while it records.
    """

    def __init__(
        self,
        x: Exchange,
        placement: DeviceMeshes,
        servers: Servers,
        pool: ThreadPoolExecutor,
        spans: SpanRecorder,
    ) -> None:
        self._servers, self._pool, self._spans = servers, pool, spans
        ends = list(itertools.accumulate(x.counts))
        self._arrays = [slice(end - n, end) for n, end in zip(x.counts, ends, strict=True)]
        avals = [placement.slots[slot].aval for slot in x.outputs]
        shardings = [placement.sharding(slot) for slot in x.outputs]
        first = servers.open(x.specs)
        self._crossings = [
            _Crossing(first + k, spec, x.micro_batches, avals[of], shardings[of])
            for k, (spec, of) in enumerate(zip(x.specs, self._arrays, strict=True))
        ]

    def __call__(self, call: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Exchange the arrays and wait for what they become.

        Raises:
            Exception: what a thread raised, at once, whatever others wait for.
        """
        futures = [
            self._pool.submit(crossing, self._servers, self._spans, call, arrays[of])
            for crossing, of in zip(self._crossings, self._arrays, strict=True)
        ]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        finally:
            for future in futures:
                future.cancel()
        return [array for future in futures for array in future.result()]


class _Crossing:
    """What crosses together.

    What is gathered lies in the arrays as `[microbatch, replica, …]`, and crosses as bytes, a row
    for each replica. What is summed is flat.
    """

    def __init__(
        self,
        number: int,
        spec: ExchangeSpec,
        micro_batches: int,
        avals: Sequence[Any],
        shardings: Sequence[NamedSharding],
    ) -> None:
        self._number, self._spec, self._micro_batches = number, spec, micro_batches
        self._shardings = list(shardings)
        self._avals, self._impls = zip(*map(plain_aval, avals), strict=True)

    def __call__(
        self, servers: Servers, spans: SpanRecorder, call: int, arrays: Sequence[jax.Array]
    ) -> list[jax.Array]:
        name = self._spec.name
        with jax.transfer_guard("allow"):
            jax.block_until_ready(arrays)
            with spans.span("pack", name):
                part = self._packed(arrays)
            with spans.span("put", name):
                servers.put(call, self._number, part)
            with spans.span("get", name):
                whole = servers.get(call, self._number)
            with spans.span("place", name):
                return self._placed(whole)

    def _packed(self, arrays: Sequence[jax.Array]) -> np.ndarray:
        """Return this worker's part."""
        spec = self._spec
        pairs = zip(arrays, self._impls, strict=True)
        values = [np.asarray(x if i is None else jax.random.key_data(x)) for x, i in pairs]
        if spec.kind == "gather":
            rows, lead = spec.shape[0], (self._micro_batches, spec.shape[0], -1)
            values = [x.reshape(lead).swapaxes(0, 1).reshape(rows, -1) for x in values]
            return np.concatenate([np.ascontiguousarray(x).view(np.uint8) for x in values], axis=1)
        if len(values) == 1:  # needs no copy
            return values[0].reshape(-1).astype(spec.dtype, copy=False)
        part, at = np.empty(spec.shape, spec.dtype), 0
        for x in values:
            part[at : at + x.size] = x.reshape(-1)
            at += x.size
        return part

    def _placed(self, whole: np.ndarray) -> list[jax.Array]:
        """Return the arrays that the whole holds, on the devices."""
        values = self._gathered(whole) if self._spec.kind == "gather" else self._summed(whole)
        placed = jax.device_put(values, self._shardings)
        return [
            x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(placed, self._impls, strict=True)
        ]

    def _summed(self, whole: np.ndarray) -> list[np.ndarray]:
        pieces = np.split(whole, np.cumsum([aval.size for aval in self._avals])[:-1])
        pairs = zip(pieces, self._avals, strict=True)
        return [x.reshape(aval.shape).astype(aval.dtype, copy=False) for x, aval in pairs]

    def _gathered(self, whole: np.ndarray) -> list[np.ndarray]:
        rows, values = len(whole), []
        sizes = [aval.size * aval.dtype.itemsize // rows for aval in self._avals]
        pieces = np.split(whole, np.cumsum(sizes)[:-1], axis=1)
        for piece, aval in zip(pieces, self._avals, strict=True):
            value = np.ascontiguousarray(piece).view(aval.dtype)
            value = value.reshape(rows, self._micro_batches, -1).swapaxes(0, 1)
            values.append(value.reshape(aval.shape))
        return values
