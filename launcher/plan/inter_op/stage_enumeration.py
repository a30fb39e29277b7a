"""The choices of stages one after another, by their objective: the best one, the next best.

A best-first search (A*, Hart et al. 1968) from the last stage to the first, since the cost of a
stage depends on how many are behind it. What the layers before cost at least comes from two dynamic
programs, for the sum of seconds and for the largest rest. Pure numbers.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from launcher.plan.inter_op.stage_dp import BestStages, Candidates, rests

_MOST_UNITS = 64  # in which devices are counted for what the layers before cost at least


def enumeration_cells(candidates: Candidates, num_devices: int) -> int:
    """Return the entries of the tables that an enumeration works with: what it costs to begin."""
    return candidates.seconds.size * min(num_devices, _MOST_UNITS)


def stages_by_objective(
    candidates: Candidates,
    num_devices: int,
    below: Callable[[], float],
    most_expanded: int,
    num_stages: int | None = None,
) -> Iterator[tuple[float, BestStages | None]]:
    """Yield the choices of stages that cover all layers, by growing objective, which comes first.

    The last one yielded is None, with the least objective of what is left.

    Args:
        candidates: the costs of every stage.
        num_devices: the most devices that they may have together.
        below: returns the objective to stay below, which may fall.
        most_expanded: after how many beginnings to give up.
        num_stages: how many stages; None: any number.
    """
    seconds, rest = candidates.seconds, rests(candidates)
    sizes = np.array(candidates.sizes)
    depth, count = seconds.shape[:2]
    unit = -(-num_devices // _MOST_UNITS)  # what is less is taken to need no devices
    units = [int(size) // unit for size in sizes]
    least_sum = _least(np.add, seconds, units, num_devices // unit)
    least_rest = _least(np.maximum, rest, units, num_devices // unit)
    order = itertools.count()  # of two that promise the same, the newer one is nearer to its end
    start: tuple[float, float, tuple[tuple[int, int, int], ...]] = (0.0, 0.0, ())
    queue = [(float(least_sum[0, count, -1] + least_rest[0, count, -1]), 0, count, 0, start)]
    for _ in range(most_expanded):
        if not queue or queue[0][0] >= below():
            break
        value, _, end, used, (total, most, stages) = heapq.heappop(queue)
        s = len(stages)
        if end == 0:
            if num_stages in (None, s):
                yield value, BestStages(stages, value)
            continue
        if s in (depth, num_stages):
            continue
        left = num_devices - used - sizes
        one, other = seconds[s, :end, end], np.maximum(rest[s, :end, end], most)
        after = np.maximum(left, 0) // unit
        sums = total + one + least_sum[s + 1, :end][:, after]
        values = sums + np.maximum(other, least_rest[s + 1, :end][:, after])
        for first, j in np.argwhere((values < below()) & (left >= 0)):
            child = float(total + one[first, j]), float(other[first, j])
            stage = int(first), end, int(j)
            entry = float(values[first, j]), -next(order), int(first), used + int(sizes[j])
            heapq.heappush(queue, (*entry, (*child, (stage, *stages))))
    yield (queue[0][0] if queue else np.inf), None


def _least(
    joined: np.ufunc, cost: np.ndarray, sizes: Sequence[int], num_devices: int
) -> np.ndarray:
    """Return the least cost of stages before those that are there, `[stages there, end, devices]`.

    They cover the layers `0 … end - 1`, on at most so many devices.

    Args:
        joined: how the costs of stages are joined.
        cost: `[stages behind, first, end, size]`.
        sizes: the numbers of devices that a stage may have.
        num_devices: the most devices.
    """
    depth, count = cost.shape[:2]
    found = np.full((depth + 1, count + 1, num_devices + 1), np.inf)
    found[:, 0] = 0.0
    for s in reversed(range(depth)):
        for j, size in enumerate(sizes):
            if size > num_devices or not np.isfinite(cost[s, :, :, j]).any():
                continue
            before = found[s + 1, :count, : num_devices + 1 - size]
            least = joined(cost[s, :, :, j][:, :, None], before[:, None, :]).min(axis=0)
            found[s, :, size:] = np.minimum(found[s, :, size:], least)
    return found
