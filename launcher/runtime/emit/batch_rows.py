"""Select the examples of a step's batch that this process's devices need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding


def rows_here(
    copies: Iterable[tuple[int, int, NamedSharding, int | None]],
    avals: Sequence[Any],
    stacked: Callable[[Any, int], Any],
) -> np.ndarray | None:
    """Return the numbers of the rows that lie on devices of this process, in ascending order.

    Args:
        copies: `(argument leaf, slot, sharding, stacked along axis | None)` of the batch's leaves.
        avals: the shapes of the step's argument leaves, on the whole batch.
        stacked: returns what this process holds of a leaf, stacked along an axis.

    Returns:
        int64 [rows], maybe none; or None where rows cannot be told apart, so that all are needed.
    """
    found = [np.empty(0, np.int64)]
    for leaf, _, sharding, axis in copies:
        shape = avals[leaf].shape
        if not sharding.addressable_devices:
            continue
        if axis or not shape or 0 in shape:
            return None
        # Each element is the number of its row; it takes no memory.
        numbers = np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        numbers = np.broadcast_to(numbers, shape)
        if axis is not None:
            numbers = stacked(numbers, axis)
        first: tuple[Any, ...] = (..., *[0] * (len(shape) - 1))
        boxes = sharding.addressable_devices_indices_map(numbers.shape).values()
        found += [numbers[box][first].ravel() for box in boxes]
    return np.unique(np.concatenate(found))
