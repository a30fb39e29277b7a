"""Compare the replicas of arrays bit by bit, and make them equal at the start."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from launcher.arrays.stacked_array import with_rows, with_stacks
from launcher.partition import axes
from launcher.runtime.observe.digests import (
    Copies,
    from_words,
    is_replicated,
    leaf_name,
    place_of,
    to_words,
)
from launcher.runtime.transport.transfer import boxes, is_here


class ReplicaError(RuntimeError):
    """An error raised when replicas differ; the message names the array and its devices."""


class OddReplica(NamedTuple):
    """A replica that differs from the others.

    Attributes:
        leaf: the array's name.
        device: the number of its device, as a plan counts them.
        process: the number of its process.
        others: the number of a device with what most replicas hold, and of its process.
    """

    leaf: str
    device: int
    process: int
    others: tuple[int, int]


def check_equal(parts: Iterable[Copies], when: str = "") -> None:
    """Raise ReplicaError if replicas differ.

    Args:
        parts: the digests of all processes.
        when: what the error begins with.
    """
    found = odd_replicas(parts)
    if not found:
        return
    first = found[0]
    leaves = len({each.leaf for each in found})
    more = f", and so do replicas of {leaves - 1} more arrays" if leaves > 1 else ""
    raise ReplicaError(
        f"{when}the replica of {first.leaf} on device {first.device} (process {first.process}) "
        f"differs from that on device {first.others[0]} (process {first.others[1]}){more}; "
        "a device or a link may be faulty, or a process changes what it holds by itself. "
        "Earlier checkpoints remain"
    )


def odd_replicas(parts: Iterable[Copies]) -> list[OddReplica]:
    """Return the replicas that differ from most others of the same part of an array.

    A tie is decided for the replica on the device with the lowest number.

    Args:
        parts: the digests of all processes.
    """
    index: dict[str, int] = {}
    found = [np.empty((0, 5), np.int64)]
    for part in parts:
        ids = np.array([index.setdefault(name, len(index)) for name in part.names], np.int64)
        rows = part.rows.copy()
        rows[:, 0] = ids[rows[:, 0]] if len(rows) else rows[:, 0]
        found.append(rows)
    rows = np.concatenate(found)
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    same = (rows[1:, :2] == rows[:-1, :2]).all(1)
    wrong = np.unique(rows[1:][same & (rows[1:, 4] != rows[:-1, 4]), :2], axis=0)
    names = list(index)
    return [
        OddReplica(names[leaf], int(row[2]), int(row[3]), others)
        for leaf, box in wrong.tolist()
        for row, others in _odd(rows[(rows[:, 0] == leaf) & (rows[:, 1] == box)])
    ]


def _odd(group: np.ndarray) -> list[tuple[np.ndarray, tuple[int, int]]]:
    """Return the rows whose digest is not the most common one, with the place of one that is."""
    ((common, _),) = Counter(group[:, 4].tolist()).most_common(1)
    device, process = group[group[:, 4] == common][0, 2:4].tolist()
    return [(row, (device, process)) for row in group[group[:, 4] != common]]


def shared_copies(tree: Any, rank: int | None = None) -> Copies:
    """Return digests of one copy here of what other processes hold, too; made on the host.

    Nothing is compiled for them, so they suit a comparison that is made once.

    Args:
        tree: arrays that may lie on devices of several processes.
        rank: as of `Digester`.
    """
    names: list[str] = []
    rows = [np.empty((0, 5), np.int64)]
    for path, leaf in jax.tree_util.tree_leaves_with_path(with_rows(tree)):
        if not is_replicated(leaf, rank) or (rank is None and leaf.is_fully_addressable):
            continue
        tiles = boxes(leaf.shape, leaf.sharding)
        process = {device.id: device.process_index for device in leaf.sharding.device_set}
        parts: dict[Any, int] = {
            box: part for part, box in enumerate(dict.fromkeys(tiles.values()))
        }
        owners = {box: {process[d] for d, held in tiles.items() if held == box} for box in parts}
        here = {tiles[shard.device.id]: shard for shard in leaf.addressable_shards}
        for box, shard in here.items():
            if len(owners[box]) > 1 or rank is not None:
                digest = zlib.crc32(np.ascontiguousarray(shard.data).view(np.uint8).data)
                at = place_of(shard.device, rank)
                rows.append(np.array([[len(names), parts[box], *at, digest]]))
        names.append(leaf_name(path))
    return Copies(tuple(names), np.concatenate(rows))


def with_first_replicas(tree: Any, names: Collection[str]) -> Any:
    """Return a pytree in which all replicas of some arrays hold what the first one holds.

    All processes call it together.

    Args:
        tree: the arrays.
        names: those that are to be made equal.
    """
    made = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            _from_first(leaf) if leaf_name(path) in names and is_here(leaf.sharding) else leaf
        ),
        with_rows(tree),
    )
    return with_stacks(made, tree)


def named_values(tree: Any, names: Sequence[str]) -> list[np.ndarray]:
    """Return arrays of a pytree, which lies here, on the host, by their names."""
    flat = jax.tree_util.tree_leaves_with_path(with_rows(tree))
    found = {leaf_name(path): leaf for path, leaf in flat}
    return [np.asarray(found[name]) for name in names]


def with_values(tree: Any, values: Mapping[str, np.ndarray]) -> Any:
    """Return a pytree in which some arrays, by their names, have other values."""

    def chosen(path: Any, leaf: Any) -> Any:
        name = leaf_name(path)
        return jax.device_put(values[name], leaf.sharding) if name in values else leaf

    return with_stacks(jax.tree_util.tree_map_with_path(chosen, with_rows(tree)), tree)


def _from_first(array: jax.Array) -> jax.Array:
    """Return an array whose replicas are those of the first: a sum in which others are zeros."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    cut = {axis for entry in sharding.spec for axis in axes(entry)}
    free = tuple(axis for axis in sharding.mesh.axis_names if axis not in cut)

    def local(tile: jax.Array) -> jax.Array:
        first = sum(jax.lax.axis_index(axis) for axis in free) == 0
        words = to_words(tile)
        return from_words(jax.lax.psum(jnp.where(first, words, 0), free), tile.dtype)

    spec = sharding.spec
    every = jax.shard_map(local, mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    summed: jax.Array = jax.jit(every, out_shardings=sharding, donate_argnums=0)(array)
    return summed
