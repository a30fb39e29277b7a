"""Names for a step's arguments, as a plan has them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax

from launcher.trace.interface import Interface

if TYPE_CHECKING:
    from launcher.trace.step import TracedStep


def leaf_names(step: Interface) -> tuple[str, ...]:
    """A name for every argument leaf: its argument's number and its path, joined by dots."""
    return _names(step.in_tree)


@functools.lru_cache(maxsize=8)
def _names(tree: jax.tree_util.PyTreeDef) -> tuple[str, ...]:
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    leaves, _ = jax.tree_util.tree_flatten_with_path(numbered)
    return tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)


def operand_names(step: TracedStep) -> tuple[str, ...]:
    """A name for every operand of the loss: a leaf of the step's arguments, or what it is else."""
    words: dict[Any, str] = dict.fromkeys(step.constants, "a constant")
    words |= zip(step.invars, leaf_names(step), strict=True)
    return tuple(words.get(v, f"operand {i}") for i, v in enumerate(step.loss_equation.invars))
