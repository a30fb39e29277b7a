"""The stage search: which layers make a stage, and on how many devices.

A dynamic program over stages, layers and devices, run for growing bounds on the slowest stage, as
in Alpa (Zheng et al. 2022, arXiv 2201.12023, section 5.2), with what that one leaves out: transfers
and the number of microbatches in flight are part of a stage's cost, what is done once a step is
part of the objective, and devices may stay idle. Pure numbers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


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


def lower_bound(candidates: StageTables, num_devices: int) -> tuple[float, float]:
    """Return lower bounds on the objective of any choice of stages.

    They are the sum of the stages' seconds, and the rest of the stage that has most left. Both take
    the stages to be anywhere in the pipeline. The devices' time is the sum of the rests over all
    devices of the stages, of which the busiest has at least its share.
    """
    seconds, bound = candidates.seconds, rests(candidates)
    if not seconds.size:
        return np.inf, np.inf
    device_seconds = (bound * np.array(candidates.sizes)).min(axis=(0, 3))
    return least_cover(seconds.min(axis=(0, 3))), least_cover(device_seconds) / num_devices


def best_stages(
    candidates: StageTables,
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
        candidates: the costs of every stage.
        num_devices: number of devices.
        best: an objective to stay below.
        progress: called with the share that is done, 0 … 1.
        num_stages: how many stages; None: as many as are best.

    Returns:
        None if there are none, or none below `best`.
    """
    seconds, bound = candidates.seconds, rests(candidates)
    levels = np.unique(bound[np.isfinite(bound)])
    floor = lower_bound(candidates, num_devices)[1] * (1 - 1e-9)
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
        least, stages = _solve(allowed, candidates.sizes, num_devices, num_stages)
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


def rests(candidates: StageTables) -> np.ndarray:
    """Return the rest of each possible stage."""
    return np.where(np.isfinite(candidates.seconds), candidates.rest, np.inf)


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
            least = np.take_along_axis(total, end[:, None, :], 1)[:, 0, :]
            better = least < step_best[:count, size:]
            step_best[:count, size:][better] = least[better]
            chosen = end * len(sizes) + np.take_along_axis(j, end, 1)
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
