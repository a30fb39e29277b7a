"""Stage construction: the layers and the number of devices of every stage.

A dynamic program over stages, layers and devices, run for growing bounds on the slowest stage, as
in Alpa (Zheng et al. 2022, arXiv 2201.12023, section 5.2), with what that one leaves out: transfers
and the number of microbatches in flight are part of a stage's cost, what is done once a step is
part of the objective, and devices may stay idle.

The next best choices come from a best-first search (A*, Hart et al. 1968) from the last stage to
the first, since the cost of a stage depends on how many are behind it. Two
dynamic programs bound what the layers before cost: the sum of seconds, and the largest rest. Pure
numbers.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_MOST_HOSTS_MORE = 2  # that are distinguished, of those that the layers before may need
MOST_UNITS = 64  # in which devices are counted for what the layers before cost at least


@dataclass(frozen=True)
class StageTables:
    """The costs of a stage of layers `first … end - 1`.

    Attributes:
        sizes: the numbers of devices that a stage may have.
        seconds: `[stages behind it, first, end, size]`: of one microbatch, forward and backward,
            and its transfer to the next stage; infinite where it does not fit.
        rest: the same shape: what the stage does besides the first microbatch, in seconds: the
            other microbatches, and what is done once a step.
        once: the same shape: the part of it that is done once a step, which no stage begins before
            all are done with the microbatches; None: nothing is.
    """

    sizes: tuple[int, ...]
    seconds: np.ndarray
    rest: np.ndarray
    once: np.ndarray | None = None


@dataclass(frozen=True)
class BestStages:
    """The best stages, and their objective.

    Attributes:
        stages: `(first, end, position in sizes)`, in order.
        objective: the objective in seconds.
    """

    stages: tuple[tuple[int, int, int], ...]
    objective: float


def objective(seconds: Sequence[float], rest: Sequence[float]) -> float:
    """Return the seconds of a step.

    One microbatch passes through all stages; the rest of the stage that has most left follows.
    """
    return sum(seconds) + max(rest)


def lower_bound(tables: StageTables, num_devices: int) -> tuple[float, float]:
    """Return lower bounds on the objective of any choice of stages.

    They are the sum of the stages' seconds, and the rest of the stage that has most left. Both take
    the stages to be anywhere in the pipeline. The devices' time is the sum of the rests over all
    devices of the stages, of which the busiest has at least its share.
    """
    seconds, bound = tables.seconds, rests(tables)
    if not seconds.size:
        return np.inf, np.inf
    device_seconds = (bound * np.array(tables.sizes)).min(axis=(0, 3))
    return least_cover(seconds.min(axis=(0, 3))), least_cover(device_seconds) / num_devices


def best_stages(
    tables: StageTables,
    num_devices: int,
    best: float = np.inf,
    progress: Callable[[float], None] = lambda share: None,
    num_stages: int | None = None,
) -> BestStages | None:
    """Return the stages that cover all layers at the least objective.

    They are on at most `num_devices` devices.

    The least sum of seconds under a bound on the rest falls as the bound grows. So between two
    bounds nothing is better than the sum of the upper one with the least bound between them, and
    most bounds need not be tried.

    Args:
        tables: the costs of every stage.
        num_devices: number of devices.
        best: an objective to stay below.
        progress: called with the share that is done, 0 … 1.
        num_stages: how many stages; None: as many as are best.

    Returns:
        None if there are none, or none below `best`.
    """
    seconds, bound = tables.seconds, rests(tables)
    levels = np.unique(bound[np.isfinite(bound)])
    floor = lower_bound(tables, num_devices)[1] * (1 - 1e-9)
    levels = levels[np.searchsorted(levels, floor) :]
    if not len(levels):
        return None
    found: BestStages | None = None

    def solved(k: int) -> float:
        """Return the least sum under bound `k`, or less where it is of no use.

        Its stages may be the best so far.
        """
        nonlocal best, found
        allowed = np.where(bound <= levels[k], seconds, np.inf)
        least = least_cover(allowed.min(axis=(0, 3)))
        if least + levels[0] >= best:
            return least
        least, stages = _solve(allowed, tables.sizes, num_devices, num_stages)
        if stages:
            at = [(len(stages) - 1 - s, *stage) for s, stage in enumerate(stages)]
            value = objective([float(seconds[i]) for i in at], [float(bound[i]) for i in at])
            if value < best:
                best, found = value, BestStages(tuple(stages), value)
        return least

    top = len(levels) - 1
    least = solved(top)
    between = [(least + levels[0], -1, top, least)] if np.isfinite(least) else []
    done = 0
    while between and between[0][0] < best:
        _, low, high, least = heapq.heappop(between)
        done += high - low <= 2
        progress(1 - 1 / (1 + done))
        middle = (low + high) // 2
        if middle == low:
            continue
        sums = solved(middle)
        if np.isfinite(sums) and middle - low > 1:
            heapq.heappush(between, (sums + levels[low + 1], low, middle, sums))
        if high - middle > 1:
            heapq.heappush(between, (least + levels[middle + 1], middle, high, least))
    return found


def rests(tables: StageTables) -> np.ndarray:
    """Return the rest of each possible stage."""
    return np.where(np.isfinite(tables.seconds), tables.rest, np.inf)


def least_cover(cost: np.ndarray) -> float:
    """Return the least sum of `[first, end]` costs of runs that cover all layers.

    It is infinite if none do.
    """
    return float(_covers_from(cost)[0])


def with_others(cost: np.ndarray) -> np.ndarray:
    """Return the least sum of costs of runs that cover all layers, by one of them.

    Args:
        cost: `[first, end, way]`.
    """
    cheapest = cost.min(2)
    after = _covers_from(cheapest)
    # The same from the other side: layers and the ends of runs counted from the last.
    before = _covers_from(
        np.pad(cheapest, ((0, 1), (0, 0)), constant_values=np.inf).T[::-1, ::-1][:-1]
    )
    return np.asarray(before[::-1][:-1, None, None] + cost + after[None, :, None])


def _covers_from(cost: np.ndarray) -> np.ndarray:
    """Return the least sum of `[first, end]` costs of runs that cover the layers from each on."""
    count = len(cost)
    least = np.full(count + 1, np.inf)
    least[count] = 0.0
    for first in reversed(range(count)):
        least[first] = (cost[first] + least).min()
    return least


def _solve(
    seconds: np.ndarray, sizes: Sequence[int], num_devices: int, num_stages: int | None
) -> tuple[float, list[tuple[int, int, int]]]:
    """Return the least sum of seconds, and its stages.

    `f[s, l, d]` covers layers `l …` by `s` stages on exactly `d` devices.
    """
    most, count = seconds.shape[0], seconds.shape[1]
    alike: dict[int, list[int]] = {}
    for j in np.flatnonzero(np.isfinite(seconds).any(axis=(0, 1, 2))).tolist():
        alike.setdefault(sizes[j], []).append(j)
    unit = math.gcd(*alike)  # all devices are counted in it
    num_devices //= max(unit, 1)
    f = np.full((most + 1, count + 1, num_devices + 1), np.inf)
    f[0, count, 0] = 0.0
    choice: list[np.ndarray] = []
    for s in range(1, most + 1):
        step_best = np.full((count + 1, num_devices + 1), np.inf)
        step_choice = np.zeros((count + 1, num_devices + 1), np.int32)
        for size, of_size in ((each // unit, of_size) for each, of_size in sorted(alike.items())):
            if size > num_devices:
                continue
            among = seconds[s - 1][:, :, of_size]
            j = np.array(of_size)[among.argmin(axis=2)]
            cost = among.min(axis=2)
            if not np.isfinite(cost).any():
                continue
            shifted = f[s - 1][:, : num_devices + 1 - size]
            total = cost[:, :, None] + shifted[None, :, :]
            end = total.argmin(axis=1)
            first, left = np.ogrid[:count, : end.shape[1]]
            least = total[first, end, left]
            better = least < step_best[:count, size:]
            step_best[:count, size:][better] = least[better]
            chosen = end * len(sizes) + j[first, end]
            step_choice[:count, size:][better] = chosen[better]
        f[s] = step_best
        choice.append(step_choice)
    finals = f[1:, 0, :]
    if num_stages is not None:
        asked = np.arange(1, most + 1) == num_stages
        finals = np.where(asked[:, None], finals, np.inf)
    at = np.unravel_index(int(finals.argmin()), finals.shape)
    value = float(finals[at])
    if not np.isfinite(value):
        return value, []
    stages, layer, devices = [], 0, int(at[1])
    for s in range(int(at[0]) + 1, 0, -1):
        end, j = divmod(int(choice[s - 1][layer, devices]), len(sizes))
        stages.append((layer, end, j))
        layer, devices = end, devices - sizes[j] // unit
    return value, stages


@dataclass(frozen=True, eq=False)
class Crossings:
    """What crossing from host to host costs beside what stages are priced at.

    A stage of less than a host is priced as if the next one were on the same host. A host
    has at most as many of these stages as it has devices, so that there are some crossings.

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


def stages_by_objective(
    tables: StageTables,
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
        tables: the costs of every stage.
        num_devices: the most devices that they may have together.
        below: returns the objective to stay below, which may fall.
        most_expanded: after how many beginnings to give up.
        num_stages: how many stages; None: any number.
        crossings: what crossing hosts costs, if there are several.
        round_trips: by the number of stages behind, how many microbatches go through a stage and
            these and back, each after the one before, beside the first microbatch.
    """
    seconds = tables.seconds
    rest, once = _parted(tables)
    sizes = np.array(tables.sizes)
    depth, count = seconds.shape[:2]
    before = _Before(tables, num_devices, crossings)
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
        self._unit = -(-num_devices // MOST_UNITS)  # what is less is taken to need no devices
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
