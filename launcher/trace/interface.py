"""The arguments and results of a step, or of a part of one, and its program around the loss."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax

from launcher.trace.ir.jaxpr import Atom, Aval, Equation, Var, is_var


@dataclass(frozen=True, eq=False)
class Interface:
    """The arguments and results of a program.

    Attributes:
        in_tree, out_tree, in_avals: the arguments and results, whole batch shapes.
        invars: one variable an argument leaf. outvars: one atom a result leaf.
        donated, batch: per argument leaf.
        aliases: result leaf -> the donated argument leaf whose place it takes.
    """

    in_tree: Any
    out_tree: Any
    in_avals: tuple[Aval, ...]
    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    donated: tuple[bool, ...]
    batch: tuple[bool, ...]
    aliases: dict[int, int]


@dataclass(frozen=True, eq=False)
class OuterProgram(Interface):
    """The equations of a step with one loss.

    Attributes:
        before, loss_equation, after: the outer program, split at the loss.
    """

    before: tuple[Equation, ...]
    loss_equation: Equation
    after: tuple[Equation, ...]

    @functools.cached_property
    def operands(self) -> tuple[Var, ...]:
        """The operands of the loss, of which a large model has thousands."""
        return tuple(v for v in self.loss_equation.invars if is_var(v))  # as all of them are


def leaf_names(step: Interface) -> tuple[str, ...]:
    """Return a name for every argument leaf: its argument's number and its path, joined by dots."""
    return _names(step.in_tree)


@functools.lru_cache(maxsize=8)
def _names(tree: jax.tree_util.PyTreeDef) -> tuple[str, ...]:
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    leaves, _ = jax.tree_util.tree_flatten_with_path(numbered)
    return tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
