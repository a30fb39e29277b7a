"""The choices of stages one after another, by their objective: the best one, the next best.

A best-first search (A*, Hart et al. 1968) from the last stage to the first, since the cost of a
stage depends on how many are behind it. What the layers before cost at least comes from two dynamic
programs, for the sum of seconds and for the largest rest. Pure numbers.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from launcher.plan.inter_op.stage_dp import BestStages, StageTables, rests

_MOST_HOSTS_MORE = 2  # that are told apart, of those that the layers before may need
_MOST_UNITS = 64  # in which devices are counted for what the layers before cost at least


@dataclass(frozen=True, eq=False)
class Crossings:
    """What crossing from host to host costs beside what stages are priced at.

    A stage of less than a host is priced as if the next one were on the same host. Of the stages
    of less than a host no more stand on one than it has devices, so that there are some crossings.

    Attributes:
        devices_per_host: the devices of a host.
        extra: `[crossings]`: seconds that the first microbatch takes more, at least.
        rest: `[whether the last stage is of less than a host, crossings]`: seconds in which a link
            is busy with the others, at least.
    """

    devices_per_host: int
    extra: np.ndarray
    rest: np.ndarray

    @classmethod
    def of(
        cls, sends: np.ndarray, local: np.ndarray, others: int, hidden: np.ndarray, each: int
    ) -> Crossings:
        """Return the costs, the cheapest boundaries first.

        Args:
            sends: seconds of a microbatch between hosts, by the layer before.
            local: the same inside a host, at most.
            others: the number of microbatches but the first.
            hidden: the forward passes that the first round trip hides, by the layers after it.
            each: the devices of a host.
        """
        extra = np.cumsum(np.sort(np.maximum(2 * (sends - local), 0.0)))
        never = [np.inf]  # there are no more boundaries
        return cls(
            each,
            np.concatenate([[0.0], extra, never]),
            _busiest_link(sends, others, hidden),
        )


def _busiest_link(sends: np.ndarray, others: int, hidden: np.ndarray) -> np.ndarray:
    """Return `Crossings.rest`.

    Of each host that stages share take neighbours on it that do not have any on it beside them. The
    host's link to the others carries activations from the last of them and gradients from the
    first, and the link from the others the same at the other ends. When the first gradient crosses
    a boundary, all others still have to, and so do the activations at the other boundary but those
    that are ahead of it. The least of the busiest hosts is sought: from layer to layer, with the
    neighbours of one host more each time.
    """
    count = len(sends) + 1
    # Nothing comes to the first layer or leaves the last.
    at = np.concatenate([[0.0], sends, [0.0]])
    before, after = at[:, None], at
    behind = count - np.arange(count + 1)[:, None]  # the first of the neighbours has one layer less
    ahead, further = hidden[np.maximum(behind - 1, 0)], hidden[behind]
    busy = np.maximum(
        others * before + np.maximum(others - ahead, 0) * after,
        others * after + np.maximum(others - further, 0) * before,
    )
    busy[np.tri(count + 1, dtype=bool)] = np.inf  # `[first, end]` of the neighbours
    least = np.zeros(count + 1)  # of the hosts so far, with layers before each
    found = np.full((2, count + 1), np.inf)
    found[:, 0] = 0.0
    for crossings in range(1, count):
        reached = np.maximum(least[:, None], busy).min(0)
        reached[-1] = np.inf
        found[0, crossings] = reached.min()
        least = np.minimum.accumulate(reached)
        found[1, crossings] = np.maximum(least, busy[:, -1]).min()
    return found


def enumeration_cells(candidates: StageTables, num_devices: int) -> int:
    """Return the entries of the tables that an enumeration works with: what it costs to begin."""
    return candidates.seconds.size * min(num_devices, _MOST_UNITS)


def stages_by_objective(
    candidates: StageTables,
    num_devices: int,
    below: Callable[[], float],
    most_expanded: int,
    num_stages: int | None = None,
    crossings: Crossings | None = None,
    round_trips: Sequence[int] = (),
) -> Iterator[tuple[float, BestStages | None]]:
    """Yield the choices of stages that cover all layers, by growing objective, which comes first.

    The last one yielded is None, with the least objective of what is left.

    Args:
        candidates: the costs of every stage.
        num_devices: the most devices that they may have together.
        below: returns the objective to stay below, which may fall.
        most_expanded: after how many beginnings to give up.
        num_stages: how many stages; None: any number.
        crossings: what crossing hosts costs, if there are several.
        round_trips: by the number of stages behind, how many microbatches go through a stage and
            these and back, each after the one before, beside the first microbatch.
    """
    seconds = candidates.seconds
    rest, once = _parted(candidates)
    sizes = np.array(candidates.sizes)
    depth, count = seconds.shape[:2]
    before = _Before(candidates, num_devices, crossings)
    order = itertools.count()  # of two that promise the same, the newer one is nearer to its end
    start: tuple[float, float, float, tuple[tuple[int, int, int], ...]] = (0.0, 0.0, 0.0, ())
    nothing = (np.zeros((1, 1)),) * 3
    first_value = float(before.least(0, [count], nothing, np.zeros(1, int), ()).min())
    queue = [(first_value, 0, count, 0, start)]
    for _ in range(most_expanded):
        if not queue or queue[0][0] >= below():
            break
        value, _, end, used, (total, most, done, stages) = heapq.heappop(queue)
        s = len(stages)
        if end == 0:
            if num_stages in (None, s):
                yield value, BestStages(stages, value)
            continue
        if s in (depth, num_stages):
            continue
        left = num_devices - used - sizes
        sums, other = total + seconds[s, :end, end], np.maximum(rest[s, :end, end], most)
        if s < len(round_trips) and round_trips[s]:  # through this stage and those behind it
            other = np.maximum(other, round_trips[s] * sums)
        there = sums, other, np.maximum(once[s, :end, end], done)
        after = [sizes[j] for _, _, j in stages]
        values = before.least(s + 1, slice(end), there, used + sizes, after, sizes)
        for first, j in np.argwhere((values < below()) & (left >= 0)):
            total, most, done = (float(of[first, j]) for of in there)
            stage = int(first), end, int(j)
            entry = float(values[first, j]), -next(order), int(first), used + int(sizes[j])
            heapq.heappush(queue, (*entry, (total, most, done, (stage, *stages))))
    yield (queue[0][0] if queue else np.inf), None


def _parted(of: StageTables) -> tuple[np.ndarray, np.ndarray]:
    """Return the rest of each possible stage without what is done once a step, and that."""
    rest = rests(of)
    if of.once is None:
        return rest, np.zeros_like(rest)
    finite = np.isfinite(rest)
    once = np.where(finite, of.once, np.inf)
    return np.where(finite, rest - np.where(finite, once, 0.0), np.inf), once


class _Before:
    """What pipelines take at least, with the layers before the stages that are there."""

    def __init__(self, of: StageTables, num_devices: int, crossings: Crossings | None) -> None:
        self._unit = -(-num_devices // _MOST_UNITS)  # what is less is taken to need no devices
        self._devices, self._crossings = num_devices, crossings
        self._any = self._tables(of, of.sizes)
        if crossings:
            # Only stages of less than a host share one.
            self._each = crossings.devices_per_host
            self._sharing = self._tables(of, [n if n < self._each else 0 for n in of.sizes])

    def _tables(self, of: StageTables, sizes: Sequence[int]) -> list[np.ndarray]:
        units, most = [int(n) // self._unit for n in sizes], self._devices // self._unit
        ways = zip((np.add, np.maximum, np.maximum), (of.seconds, *_parted(of)), strict=True)
        return [_least(joined, cost, units, most) for joined, cost in ways]

    def least(
        self,
        stages: int,
        at: slice | list[int],
        there: tuple[np.ndarray, np.ndarray, np.ndarray],
        used: np.ndarray,
        after: Sequence[int],
        sizes: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return lower bounds on the objective, `[first, size]`.

        Args:
            stages: the stages that are there.
            at: the layers `first`, before which others are to come.
            there: of the stages that are there the sum of their seconds, the largest rest without
                what is done once a step, and the most of that, `[first, size]`.
            used: the devices that they have, `[size]`.
            after: the devices of each of them but the first.
            sizes: the devices of the first one, `[size]`.
        """
        total, rest, done = there

        def looked_up(tables: list[np.ndarray], left: np.ndarray) -> list[np.ndarray]:
            units = np.clip(left, 0, self._devices) // self._unit
            return [table[stages, at][:, units] for table in tables]

        sums, most, once = looked_up(self._any, self._devices - used)
        if self._crossings is None:
            return np.asarray(total + sums + np.maximum(rest, most) + np.maximum(done, once))
        each, costs = self._each, self._crossings
        sharing = np.zeros(len(used), int) if sizes is None else np.where(sizes < each, sizes, 0)
        sharing = sharing + sum(n for n in after if n < each)
        # The last stage sends nothing on.
        last = after[-1] if after else (0 if sizes is None else sizes)
        hosts, ends = -(-sharing // each), np.asarray(last < each) * 1
        found = np.full(np.broadcast_shapes(total.shape, sums.shape), np.inf)
        for more in range(_MOST_HOSTS_MORE + 1):
            before = [sums, most, once]
            if more < _MOST_HOSTS_MORE:  # else on any number of hosts
                own = looked_up(self._sharing, (hosts + more) * each - sharing)
                before = [np.maximum(*pair) for pair in zip(before, own, strict=True)]
            crossed = np.clip(hosts + more - ends, 0, len(costs.extra) - 1)
            busiest = np.maximum(np.maximum(rest, before[1]), costs.rest[ends, crossed])
            sent = total + before[0] + costs.extra[crossed]
            np.minimum(found, sent + busiest + np.maximum(done, before[2]), out=found)
        return found


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
