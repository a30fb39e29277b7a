"""Sets of moments as disjoint intervals in ascending order: united, cut, subtracted. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Intervals: TypeAlias = list[tuple[float, float]]


def united(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Return the moments that are in any of the intervals, which may overlap in any order."""
    found: Intervals = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def minus(these: Intervals, others: Intervals) -> Intervals:
    """Return the moments of `these` that are not in `others`."""
    found: Intervals = []
    k = 0
    for start, end in these:
        while k < len(others) and others[k][1] <= start:
            k += 1
        at = k
        while at < len(others) and others[at][0] < end:
            if others[at][0] > start:
                found.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < end:
            found.append((start, end))
    return found


def overlap(these: Intervals, others: Intervals) -> Intervals:
    """Return the moments that are in both."""
    return minus(these, minus(these, others))


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return how long disjoint intervals are together."""
    return sum(end - start for start, end in intervals)
