"""Host copies of the shards that a process owns and therefore writes.

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
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    shard_shape: tuple[int, ...]
    shards: tuple[tuple[Index, np.ndarray], ...]

    @property
    def is_first(self) -> bool:
        """Whether the first shard is here; its owner alone writes the array's description."""
        starts = ([s.start or 0 for s in index] for index, _ in self.shards)
        return any(not any(start) for start in starts)


def copy_to_host(state: Any) -> Any:
    """Copy a tree of arrays to the host once they are computed; return a tree of `OwnedShards`.

    The copies are needed because the next step overwrites the devices' arrays.
    """
    return _owned_in(state, _copy_on_host)


def view_on_host(state: Any) -> Any:
    """Return the same as `copy_to_host`, but as views where the arrays allow it.

    The views are valid only as long as the arrays.
    """
    return _owned_in(state, np.asarray)


def _owned_in(state: Any, on_host: Callable[[jax.Array], np.ndarray]) -> Any:
    for leaf in jax.tree.leaves(state):
        for shard in _own(leaf):
            shard.data.copy_to_host_async()  # start all before waiting for the first
    return jax.tree.map(lambda leaf: _owned_shards(leaf, on_host), state)


def _own(array: Any) -> list[jax.Shard]:
    if isinstance(array, StackedArray):
        return [shard for row in array.rows for shard in _own(row)]
    if not isinstance(array, jax.Array):
        return []
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _owned_shards(array: Any, on_host: Callable[[jax.Array], np.ndarray]) -> OwnedShards:
    if isinstance(array, StackedArray):
        return _of_rows([_owned_shards(row, on_host) for row in array.rows])
    if not isinstance(array, jax.Array):
        value = np.array(array)
        everywhere = tuple(slice(0, n) for n in value.shape)
        return OwnedShards(value.shape, value.dtype, value.shape, ((everywhere, value),))
    shards = tuple((shard.index, on_host(shard.data)) for shard in _own(array))
    shard_shape = array.sharding.shard_shape(array.shape)
    return OwnedShards(array.shape, np.dtype(array.dtype), shard_shape, shards)


def _of_rows(rows: Sequence[OwnedShards]) -> OwnedShards:
    """Return the shards of an array whose rows along the first axis are these."""
    first = rows[0]
    shards = tuple(
        ((slice(i, i + 1), *index), value[None])
        for i, row in enumerate(rows)
        for index, value in row.shards
    )
    shape, shard_shape = (len(rows), *first.shape), (1, *first.shard_shape)
    return OwnedShards(shape, first.dtype, shard_shape, shards)


def _copy_on_host(data: jax.Array) -> np.ndarray:
    # NumPy gets a view of a CPU's array, and a copy of another device's.
    (device,) = data.devices()
    return np.array(data) if device.platform == "cpu" else np.asarray(data)
