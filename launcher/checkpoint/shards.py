"""Host copies of the shards of a process: those that it owns and therefore writes, and the others.

A shard belongs to the process that has the first of its replicas. A process writes its own shards,
and no array is ever gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from launcher.arrays.stacked_array import StackedArray

Index = tuple[slice, ...]


@dataclass(frozen=True)
class OwnedShards:
    """The shards of one array that this process is to write.

    Attributes:
        shape: the shape of the whole array.
        dtype: its type.
        shard_shape: the shape of a shard, the same for all.
        shards: the index and the value of each shard; empty if none is here.
        others: the same of shards here that another process is to write, where they are asked for.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    shard_shape: tuple[int, ...]
    shards: tuple[tuple[Index, np.ndarray], ...]
    others: tuple[tuple[Index, np.ndarray], ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether the first shard is here; its owner alone writes the array's description."""
        starts = ([s.start or 0 for s in index] for index, _ in self.shards)
        return any(not any(start) for start in starts)


def copy_to_host(state: Any) -> Any:
    """Copy a tree of arrays to the host once they are computed; return a tree of `OwnedShards`.

    The copies are needed because the next step overwrites the devices' arrays.
    """
    return _on_host(state, _own, _copy_on_host)


def view_share(state: Any) -> Any:
    """Return the same with the `others`: each distinct shard here, once.

    The values are views where the arrays allow it. While a view lives, XLA leaves its memory as it
    is, also where a step takes the array to overwrite it.
    """
    return _on_host(state, _held, np.asarray)


def outline_share(state: Any) -> Any:
    """Return the same with arrays of one element's memory as the values: shapes and types alone."""
    return _on_host(state, _held, _shape_alone)


_Find = Callable[[jax.Array], list[jax.Shard]]
_Fetch = Callable[[jax.Array], np.ndarray]


def _on_host(state: Any, find: _Find, fetch: _Fetch) -> Any:
    def found_in(leaf: Any) -> Any:
        if isinstance(leaf, StackedArray):
            return [found_in(row) for row in leaf.rows]
        return find(leaf) if isinstance(leaf, jax.Array) else []

    leaves, tree = jax.tree.flatten(state)
    found = [found_in(leaf) for leaf in leaves]
    if fetch is not _shape_alone:
        for shard in jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, jax.Shard)):
            shard.data.copy_to_host_async()  # start all before waiting for the first
    shards = [_shards(*each, fetch) for each in zip(leaves, found, strict=True)]
    return jax.tree.unflatten(tree, shards)


def _shape_alone(data: jax.Array) -> np.ndarray:
    return np.broadcast_to(np.zeros((), data.dtype), data.shape)


def _own(array: jax.Array) -> list[jax.Shard]:
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _held(array: jax.Array) -> list[jax.Shard]:
    by_first = sorted(array.addressable_shards, key=lambda shard: shard.replica_id, reverse=True)
    return list({str(shard.index): shard for shard in by_first}.values())


def _shards(array: Any, found: Any, fetch: _Fetch) -> OwnedShards:
    if isinstance(array, StackedArray):
        rows = zip(array.rows, found, strict=True)
        return _of_rows([_shards(row, of_row, fetch) for row, of_row in rows])
    if not isinstance(array, jax.Array):
        value = np.array(array)
        everywhere = tuple(slice(0, n) for n in value.shape)
        return OwnedShards(value.shape, value.dtype, value.shape, ((everywhere, value),))
    values = [(shard.replica_id == 0, (shard.index, fetch(shard.data))) for shard in found]
    shards = tuple(each for is_own, each in values if is_own)
    others = tuple(each for is_own, each in values if not is_own)
    shard_shape = array.sharding.shard_shape(array.shape)
    return OwnedShards(array.shape, np.dtype(array.dtype), shard_shape, shards, others)


def _of_rows(rows: Sequence[OwnedShards]) -> OwnedShards:
    """Return the shards of an array whose rows along the first axis are these."""

    def stacked(of_row: Callable[[OwnedShards], tuple[Any, ...]]) -> tuple[Any, ...]:
        return tuple(
            ((slice(i, i + 1), *index), value[None])
            for i, row in enumerate(rows)
            for index, value in of_row(row)
        )

    first = rows[0]
    shape, shard_shape = (len(rows), *first.shape), (1, *first.shard_shape)
    shards, others = stacked(lambda row: row.shards), stacked(lambda row: row.others)
    return OwnedShards(shape, first.dtype, shard_shape, shards, others)


def _copy_on_host(data: jax.Array) -> np.ndarray:
    # NumPy gets a view of a CPU's array, and a copy of another device's.
    (device,) = data.devices()
    return np.array(data) if device.platform == "cpu" else np.asarray(data)
