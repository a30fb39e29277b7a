"""Recomputation in a stage: its first layers in full, the others selectively or not at all.

The search counts in layers of its own table, each of which may stand for several of the step's;
remat strings (`base.names`) count in the step's. Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from launcher.base import parse_remat

FEWEST = "fewest"  # beside the remat strings: as few layers as fit the memory


class Recompute(NamedTuple):
    """The layers that a stage's backward pass recomputes.

    Attributes:
        full: number of its first layers that are recomputed in full.
        selective: whether its other layers are recomputed selectively.
        is_open: whether the search has yet to choose: costs are then lower bounds over all choices.
    """

    full: int = 0
    selective: bool = False
    is_open: bool = False

    def remat(self, groups: Sequence[Sequence[int]]) -> str:
        """Return the remat string of a stage; `groups` are the step's layers in each of its own."""
        rest = "selective" if self.selective else "none"
        if self.full == 0:
            return rest
        if self.full >= len(groups):
            return "full"
        word = f"full:{sum(map(len, groups[: self.full]))}"
        return f"{word}+{rest}" if self.selective else word


NOTHING, OPEN = Recompute(), Recompute(is_open=True)


def recompute_of(remat: str, groups: Sequence[Sequence[int]], selective: bool) -> Recompute:
    """Return the recomputation that a remat string asks of a stage.

    Args:
        remat: the remat string; `FEWEST` is open.
        groups: the step's layers in each of the stage's.
        selective: whether costs of selective recomputation are known; without them, a selective
            policy counts as full.
    """
    if remat == FEWEST:
        return OPEN
    name = parse_remat(remat)
    if name.policy == "none":
        return NOTHING
    if selective and remat == "selective":
        return Recompute(0, selective=True)
    most, ends = name.first or np.inf, np.cumsum([len(group) for group in groups])
    full = min(int((ends < most).sum()) + 1, len(groups))
    return Recompute(full, selective and name.rest == "selective" and full < len(groups))


def every_recompute(layers: int, selective: bool) -> tuple[Recompute, ...]:
    """Return all choices for stages of up to `layers` layers; the first recomputes nothing."""
    full = [Recompute(n) for n in range(layers + 1)]
    mixed = [Recompute(n, selective=True) for n in reversed(range(layers))]
    return (*full, *mixed) if selective else tuple(full)


def first_layers(of: np.ndarray, count: int | np.ndarray) -> np.ndarray:
    """Return the costs of each stage's first `count` layers.

    Args:
        of: the costs of whole stages, `[mesh, first, end]`.
        count: number of layers; of an array of numbers, each along a leading axis.
    """
    if isinstance(count, int) and count == 0:
        return np.zeros_like(of)
    if isinstance(count, int) and count >= of.shape[-2]:
        return of
    return _taken(of, _places(of, count)[0])


def other_layers(of: np.ndarray, count: int | np.ndarray) -> np.ndarray:
    """Return the costs of each stage's layers behind the first `count`; see `first_layers`."""
    if isinstance(count, int) and count == 0:
        return of
    if isinstance(count, int) and count >= of.shape[-2]:
        return np.zeros_like(of)
    padded = np.concatenate([of, np.zeros_like(of[..., :1, :])], -2)  # no stage begins at the end
    return _taken(padded, _places(of, count)[1])


def _places(of: np.ndarray, count: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of every stage's first layers and others among flattened stages."""
    if isinstance(count, int):
        return _kept_split(of.shape[-2], of.shape[-1], count)
    return _split(of.shape[-2], of.shape[-1], count[:, None, None])


def _split(firsts: int, ends: int, count: Any) -> tuple[np.ndarray, np.ndarray]:
    first, end = np.ogrid[:firsts, :ends]
    others = np.minimum(first + count, np.maximum(first, end))
    return first * ends + others, others * ends + end


_kept_split = functools.lru_cache(maxsize=4096)(_split)


def _taken(of: np.ndarray, places: np.ndarray) -> np.ndarray:
    found = np.take(of.reshape(*of.shape[:-2], -1), places, axis=-1)
    return np.moveaxis(found, -3, 0)
