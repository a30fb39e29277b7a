"""How many layers of a stage are computed again: the first ones, as few as the memory asks for.

The words are those of `remat_name`; the search counts in layers of its own table, each of which may
be several of the step's. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from launcher.remat_name import parse_remat

FEWEST = "fewest"  # for the search to choose from, beside the words of `remat_name`


def layers_again(word: str, groups: Sequence[Sequence[int]]) -> int:
    """Return how many layers of a stage are computed again.

    Args:
        word: what the stage computes again.
        groups: the step's layers in each of the stage's.
    """
    name = parse_remat(word)
    if name.policy == "none":
        return 0
    most, ends = name.first or np.inf, np.cumsum([len(group) for group in groups])
    return min(int((ends < most).sum()) + 1, len(groups))


def remat_word(again: int, groups: Sequence[Sequence[int]]) -> str:
    """Return the word for a stage that computes so many of its layers again; see `layers_again`."""
    if again == 0:
        return "none"
    if again >= len(groups):
        return "full"
    return f"full:{sum(map(len, groups[:again]))}"


def first_layers(of: np.ndarray, count: int | None) -> np.ndarray:
    """Return the costs of each stage's first layers.

    Args:
        of: the costs of whole stages, `[first, end]`; or the same on several meshes.
        count: number of layers; None: each number, along a leading axis.
    """
    if count == 0:
        return np.zeros_like(of)
    first, end = np.ogrid[: of.shape[-2], : of.shape[-1]]
    if count is not None and count >= len(first):
        return of
    return np.asarray(of[..., first, _cut(first, end, count)])


def other_layers(of: np.ndarray, count: int | None) -> np.ndarray:
    """Return the costs of each stage's layers behind the first `count`; see `first_layers`."""
    if count == 0:
        return of
    first, end = np.ogrid[: of.shape[-2], : of.shape[-1]]
    if count is not None and count >= len(first):
        return np.zeros_like(of)
    padded = np.concatenate([of, np.zeros_like(of[..., :1, :])], -2)  # no stage begins at the end
    return np.asarray(padded[..., _cut(first, end, count), end])


def _cut(first: np.ndarray, end: np.ndarray, count: int | None) -> np.ndarray:
    """Return where the other layers begin."""
    counts = np.arange(len(first) + 1)[:, None, None] if count is None else count
    return np.asarray(np.minimum(first + counts, np.maximum(first, end)))
