"""Parameters by their names, and the patterns of settings that pick some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import jax

from launcher.recipes import InputError

_MOST_NAMED = 4

Picks = Callable[[str], bool]  # whether a parameter is one of them, by its name


def flat_name(path: Any) -> str:
    """Return the name of a leaf, of its path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def matches(*patterns: str) -> Picks:
    """Return a function that says whether a name fits one of these patterns."""
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def map_named(fun: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return the tree of `fun(name, leaf, ...)`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: fun(flat_name(path), *leaves), tree, *others
    )


def split_named(params: Any, picks: Picks) -> tuple[Any, Any]:
    """Return two trees, of the leaves that are picked and of the others; None stands for a leaf."""
    picked = map_named(lambda name, leaf: leaf if picks(name) else None, params)
    others = map_named(lambda name, leaf: None if picks(name) else leaf, params)
    return picked, others


def rejoined(one: Any, other: Any) -> Any:
    """Return the tree of which `split_named` made two."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, one, other, is_leaf=lambda leaf: leaf is None
    )


def check_pattern(key: str, pattern: str, params: Any) -> None:
    """Raise InputError if a setting's pattern fits no parameter."""
    names = [flat_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if not any(map(matches(pattern), names)):
        raise InputError(
            f"{key}={pattern} is the name of no parameter; this model has {_some(names)}"
        )


def _some(names: Iterable[str]) -> str:
    """Return some names, of those that differ in their last words."""
    different = list({name.rpartition(".")[2]: name for name in names}.values())
    more = ", …" if len(different) > _MOST_NAMED else ""
    return ", ".join(different[:_MOST_NAMED]) + more
