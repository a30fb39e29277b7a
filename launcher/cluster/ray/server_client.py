"""Client of the parameter servers in a worker: send parts, receive results, in any thread."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from launcher.runtime import ExchangeSpec


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
