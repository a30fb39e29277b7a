"""Parameter servers, which sum the parts of the workers in rank order, and the workers' client.

A server's actor is a `worker_actor.Server`, in which calls wait for one another without a thread
each, so a server that waits takes no processor. The module imports neither JAX nor our other
modules: the process is to be small, and up soon.

Ray brings a large part through its object store, where the server reads it in place. The whole goes
back the same way, written once for all workers.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from launcher.runtime import ExchangeSpec

_WRITTEN_ONCE = 1 << 20  # bytes from which one object for all workers is quicker than one for each


class ExchangeServer:
    """Combine the parts of the exchanges of this server, once all workers have sent theirs.

    Args:
        count: the number of workers.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._waiting: dict[tuple[int, int], _Exchange] = {}

    async def exchange(
        self, key: tuple[int, int], rank: int, axis: int | None, part: np.ndarray
    ) -> Any:
        """Take one worker's part of an exchange and return the whole when it is there.

        Args:
            key: the numbers of the call and of the exchange.
            rank: the number of the worker.
            axis: None if parts are added; else the axis along which they are joined.
            part: the part.

        Returns:
            The whole or, if it is large, a list with Ray's reference to it.

        Raises:
            ValueError: parts do not fit one another; each worker gets the error.
        """
        if key not in self._waiting:
            whole = asyncio.get_running_loop().create_future()
            self._waiting[key] = _Exchange(whole, Sum() if axis is None else Join(axis))
        exchange = self._waiting[key]
        exchange.taken += 1
        if exchange.taken == self._count:
            del self._waiting[key]
        try:
            exchange.parts.take(rank, part)
            if exchange.taken == self._count:
                exchange.whole.set_result(_sent(exchange.parts.whole()))
        except ValueError as error:
            if not exchange.whole.done():
                exchange.whole.set_exception(error)
        return await exchange.whole


class Sum:
    """The sum of arrays, added in rank order, in whichever order they come.

    Arrays of 16 bits are added in 32.
    """

    def __init__(self) -> None:
        self._early: dict[int, np.ndarray] = {}  # parts of ranks whose turn has not come
        self._next = 0
        self._dtype: Any = None
        self._total: np.ndarray | None = None

    def take(self, rank: int, part: np.ndarray) -> None:
        """Take the array of a rank and add up what is next.

        Raises:
            ValueError: it has another shape than those before.
        """
        self._early[rank] = part
        while self._next in self._early:
            self._add(self._early.pop(self._next))
            self._next += 1

    def _add(self, part: np.ndarray) -> None:
        if self._total is None:
            self._dtype, self._total = part.dtype, part
            return
        if part.shape != self._total.shape:
            shapes = f"{list(part.shape)}, those of lower ranks {list(self._total.shape)}"
            raise ValueError(f"the part of worker {self._next} has the shape {shapes}")
        # The first part is in the object store, where nothing may be written.
        out = self._total if self._next > 1 else None
        self._total = np.add(self._total, part, out=out, dtype=_wide(self._dtype))

    def whole(self) -> np.ndarray:
        """Return the sum, in the type of the arrays."""
        assert self._total is not None
        return self._total.astype(self._dtype, copy=False)


class Join:
    """Arrays one after the other along an axis, in rank order."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._parts: dict[int, np.ndarray] = {}

    def take(self, rank: int, part: np.ndarray) -> None:
        """Take the array of a rank."""
        self._parts[rank] = part

    def whole(self) -> np.ndarray:
        """Return the joined arrays; raise ValueError if they do not fit one another."""
        return np.concatenate([self._parts[rank] for rank in sorted(self._parts)], self._axis)


@dataclass
class _Exchange:
    """An incomplete exchange: the result that its workers wait for, and the parts so far."""

    whole: asyncio.Future[Any]
    parts: Sum | Join
    taken: int = field(default=0)


def _sent(whole: np.ndarray) -> Any:
    """Return an array as it goes back to the workers."""
    if whole.nbytes < _WRITTEN_ONCE:
        return whole
    import ray

    return [ray.put(whole)]


def _wide(dtype: np.dtype) -> np.dtype:
    """Return the type in which numbers of a type are added."""
    is_half = dtype.itemsize == np.dtype(np.float16).itemsize and dtype.kind not in "iu"
    return np.dtype(np.float32) if is_half else dtype


# -- In a worker ----------------------------------------------------------------------------------


class ServerError(RuntimeError):
    """An error raised when a parameter server is gone or refuses a part."""


class ServerClient:
    """The parameter servers as one worker sees them: `launcher.runtime.transport.servers.Servers`.

    Args:
        rank: this worker's number.
        count: the number of workers.
        servers: Ray's handle and the name of each server.
        seconds: how long an exchange may take.

    Attributes:
        rank: this worker's number.
        count: the number of workers.
    """

    def __init__(
        self, rank: int, count: int, servers: Sequence[tuple[Any, str]], seconds: float
    ) -> None:
        self.rank, self.count = rank, count
        self._servers, self._seconds = tuple(servers), seconds
        self._specs: list[ExchangeSpec] = []
        self._calls = itertools.count()
        self._answers: dict[tuple[int, int], Any] = {}
        self._sent = threading.Condition()

    def open(self, exchanges: Sequence[ExchangeSpec]) -> int:
        """Make the exchanges of an executable known and return the number of the first."""
        first = len(self._specs)
        self._specs += exchanges
        return first

    def reserve(self) -> int:
        """Return the number of a new call."""
        return next(self._calls)

    def put(self, call: int, exchange: int, part: np.ndarray) -> None:
        """Give this worker's part of an exchange; see `Servers.put`."""
        spec = self._specs[exchange]
        actor, _ = self._servers[spec.server]
        axis = spec.axis if spec.kind == "gather" else None
        key = call, exchange
        # Ray copies a large array to its object store meanwhile, and frees it with the answer.
        answer = actor.answer.remote("exchange", key, self.rank, axis, part)
        with self._sent:
            self._answers[key] = answer
            self._sent.notify_all()

    def get(self, call: int, exchange: int) -> np.ndarray:
        """Wait for the whole of an exchange, read-only, once only; see `Servers.get`.

        Raises:
            ServerError: the server is gone.
            TimeoutError: it took too long; the driver finds the process to blame.
        """
        import ray

        key = call, exchange
        with self._sent:
            if not self._sent.wait_for(lambda: key in self._answers, self._seconds):
                raise self._late(exchange, "this worker has not given its part")
            answer = self._answers.pop(key)
        _, name = self._servers[self._specs[exchange].server]
        try:
            done, value = ray.get(answer, timeout=self._seconds)
            if done and isinstance(value, list):
                value = ray.get(value[0], timeout=self._seconds)
        except ray.exceptions.GetTimeoutError:
            raise self._late(exchange, f"{name} waits for a worker, or hangs") from None
        except ray.exceptions.RayError as error:
            (first, *_) = str(error).strip().splitlines() or [type(error).__name__]
            raise ServerError(f"{name} is gone: {first}") from None
        if not done:
            raise ServerError(f"{name}, {self._specs[exchange].name}: {value[0]}: {value[1]}")
        whole: np.ndarray = value
        return whole

    def _late(self, exchange: int, why: str) -> TimeoutError:
        name = self._specs[exchange].name
        return TimeoutError(f"{name} has not come for {self._seconds:g} s: {why}")
