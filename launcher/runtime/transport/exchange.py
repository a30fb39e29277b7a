"""Interface of a worker's executable to the parameter servers.

Each worker is a JAX of its own; arrays cross between them through servers alone, one exchange a
bucket of gradients. `launcher.cluster` implements `Servers`, over Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class ExchangeSpec:
    """One array that every worker gives a part of each call, and whose whole every worker gets.

    Attributes:
        name: the exchange in words, for errors and timelines.
        kind: "sum": the whole is the sum of the parts, added in rank order; "gather": the parts in
            rank order, joined along `axis`.
        shape: the shape of a part.
        dtype: the name of the dtype in which parts and the whole cross. Parts of 16 bits are
            added in 32.
        server: the number of the server that makes the whole.
        axis: the axis along which a "gather" joins parts.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    server: int
    axis: int = 0


class Servers(Protocol):
    """The parameter servers, as one worker sees them.

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
