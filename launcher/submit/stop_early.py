"""Decides which runs of a sweep are hopeless: the median rule.

Golovin et al., "Google Vizier", KDD 2017, section 3.2.2: a run is ended at step s if its best
objective so far is worse than the median of the others' at that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

LEAST_OTHERS = 3  # with fewer, a median says little
WARM_UP = 0.25  # of a run's steps, in which it is not judged

Curve = Sequence[tuple[int, float]]  # steps, rising, and the objective there (lower is better)


def is_hopeless(curve: Curve, others: Sequence[Curve], steps: int) -> bool:
    """Return whether a run is worse than the median of the others at its newest step.

    Args:
        curve: the objective of the run.
        others: those of the other runs; only those count that have got as far.
        steps: how many steps the run is to have.
    """
    if not curve or curve[-1][0] < WARM_UP * steps:
        return False
    now = curve[-1][0]
    there = [_best(other, now) for other in others if other and other[-1][0] >= now]
    found = [best for best in there if best is not None]
    mine = _best(curve, now)
    return len(found) >= LEAST_OTHERS and mine is not None and mine > median(found)


def _best(curve: Curve, until: int) -> float | None:
    return min((value for step, value in curve if step <= until), default=None)
