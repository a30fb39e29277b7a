"""What a stage computes again: its first layers in full, and the others selectively or not at all.

As little as the memory asks for. It is one number: `n` for the first n layers, `~n` (-1 - n) if the
others are computed again selectively. The words are those of `remat_name`; the search counts in
layers of its own table, each of which may be several of the step's. Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from launcher.base.remat_name import parse_remat

FEWEST = "fewest"  # for the search to choose from, beside the words of `remat_name`
Count = int | np.ndarray  # an array: a number each, along a leading axis


def layers_again(word: str, groups: Sequence[Sequence[int]], selective: bool) -> int:
    """Return the number for what a stage computes again.

    Args:
        word: what the stage computes again.
        groups: the step's layers in each of the stage's.
        selective: whether it is known what layers cost that are computed again selectively; else
            they are taken to be so in full, or as they are by a policy that is none of these.
    """
    name = parse_remat(word)
    if name.policy == "none":
        return 0
    if selective and word == "selective":
        return ~0
    most, ends = name.first or np.inf, np.cumsum([len(group) for group in groups])
    first = min(int((ends < most).sum()) + 1, len(groups))
    return ~first if selective and name.rest == "selective" and first < len(groups) else first


def remat_word(again: int, groups: Sequence[Sequence[int]]) -> str:
    """Return the word for the number of a stage; see `layers_again`."""
    first, rest = (again, "none") if again >= 0 else (~again, "selective")
    if first == 0:
        return rest
    if first >= len(groups):
        return "full"
    word = f"full:{sum(map(len, groups[:first]))}"
    return word if rest == "none" else f"{word}+{rest}"


def every_number(most: int, selective: bool) -> np.ndarray:
    """Return the numbers for stages of up to so many layers, each at its own place (`of[again]`).

    Args:
        most: the layers.
        selective: whether they may be computed again selectively.
    """
    full = np.arange(most + 1)
    return np.concatenate([full, ~full[:most][::-1]]) if selective else full


def in_full(again: Count) -> Count:
    """Return how many layers are computed again in full."""
    return np.maximum(again, ~again) if isinstance(again, np.ndarray) else max(again, ~again)


def at_all(again: Count, most: int) -> Count:
    """Return how many layers are computed again, in full or selectively, of up to so many."""
    if isinstance(again, np.ndarray):
        return np.where(again < 0, most, again)
    return most if again < 0 else again


def first_layers(of: np.ndarray, count: Count) -> np.ndarray:
    """Return the costs of each stage's first layers.

    Args:
        of: the costs of whole stages, `[first, end]`; or the same on several meshes.
        count: number of layers.
    """
    if isinstance(count, int) and count == 0:
        return np.zeros_like(of)
    if isinstance(count, int) and count >= of.shape[-2]:
        return of
    return _taken(of, _places(of, count).first)


def other_layers(of: np.ndarray, count: Count) -> np.ndarray:
    """Return the costs of each stage's layers behind the first `count`; see `first_layers`."""
    if isinstance(count, int) and count == 0:
        return of
    if isinstance(count, int) and count >= of.shape[-2]:
        return np.zeros_like(of)
    padded = np.concatenate([of, np.zeros_like(of[..., :1, :])], -2)  # no stage begins at the end
    return _taken(padded, _places(of, count).others)


class _Places(NamedTuple):
    """Where the costs of each stage's parts are in those of all stages, flattened."""

    first: np.ndarray
    others: np.ndarray


def _places(of: np.ndarray, count: Count) -> _Places:
    """Return where the first `count` layers of every stage are, and the others."""
    if isinstance(count, int):
        return _kept_cut(of.shape[-2], of.shape[-1], count)
    return _cut(of.shape[-2], of.shape[-1], count[:, None, None])


def _cut(firsts: int, ends: int, count: Count) -> _Places:
    first, end = np.ogrid[:firsts, :ends]
    others = np.minimum(first + count, np.maximum(first, end))
    return _Places(first * ends + others, others * ends + end)


_kept_cut = functools.lru_cache(maxsize=4096)(_cut)


def _taken(of: np.ndarray, places: np.ndarray) -> np.ndarray:
    return np.take(of.reshape(*of.shape[:-2], -1), places, axis=-1)
