"""Convert a step's arguments and results between its caller and its programs.

They differ where scans over parameters are open (`trace.open_scans`): the caller has a
`StackedArray` where the programs have an array for each of its rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from launcher.arrays.stacked_array import StackedArray, rows_in, stacked_in
from launcher.base.jax_compat import accept_as_array
from launcher.trace import Interface, Stacks

accept_as_array(StackedArray, lambda array: array.value)


class Caller:
    """The caller's side of a step.

    Args:
        whole: the arguments and results of the programs.
        stacks: those of the caller, if they differ.
    """

    def __init__(self, whole: Interface, stacks: Stacks | None) -> None:
        self._differs = stacks is not None
        serialization = sys.modules.get("flax.serialization")  # a script's that has it writes these
        if self._differs and serialization is not None:
            serialization.register_serialization_state(
                StackedArray, lambda array: array.value, lambda _, value: value, override=True
            )
        counts = ((0,) * len(flat) for flat in (whole.in_avals, whole.outvars))
        self._stacks = stacks or Stacks(whole.in_tree, whole.out_tree, *counts)

    def leaves(self, args: tuple[Any, ...]) -> list[Any]:
        """Return the leaves of a call's arguments, as the programs take them.

        Raises:
            TypeError: the arguments have another structure.
        """
        leaves, tree = jax.tree.flatten(args)
        if tree != (in_tree := self._stacks.in_tree):
            raise TypeError(f"the step was compiled for arguments {in_tree}, not {tree}")
        return rows_in(leaves, self._stacks.in_rows) if self._differs else leaves

    def by_leaf(self, flat: Sequence[Any], join: Callable[[tuple[Any, ...]], Any]) -> list[Any]:
        """Return something of each argument of the programs for each leaf of the caller's.

        Args:
            flat: what it is of each.
            join: makes one of those of the rows of an array.
        """
        return stacked_in(flat, self._stacks.in_rows, join)

    def arguments(self, leaves: Sequence[Any]) -> Any:
        """Return something of each leaf of the caller's arguments, in their structure."""
        return jax.tree.unflatten(self._stacks.in_tree, leaves)

    def results(self, flat: Sequence[Any]) -> Any:
        """Unflatten the programs' outputs into the caller's result tree."""
        out = stacked_in(flat, self._stacks.out_rows) if self._differs else flat
        return jax.tree.unflatten(self._stacks.out_tree, out)


def with_copies(leaf: Any) -> Any:
    """Return an array whose parts in this process are copies."""
    if isinstance(leaf, StackedArray):
        return StackedArray([with_copies(row) for row in leaf.rows])
    if not isinstance(leaf, jax.Array) or not leaf.addressable_shards:
        return leaf
    if leaf.is_fully_addressable:
        return leaf.copy()
    shards = [shard.data.copy() for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
