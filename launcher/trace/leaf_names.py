"""Names for a step's arguments, as a plan has them."""

from __future__ import annotations

import jax

from launcher.trace.interface import Interface


def leaf_names(step: Interface) -> tuple[str, ...]:
    """A name for every argument leaf: its argument's number and its path, joined by dots."""
    numbered = jax.tree.unflatten(step.in_tree, range(len(step.in_avals)))
    leaves, _ = jax.tree_util.tree_flatten_with_path(numbered)
    return tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
