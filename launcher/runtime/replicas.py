"""Compare the replicas of arrays bit by bit, by digests, and make them equal at the start.

A digest is made of each device's shard, on the device: a sum of 32-bit words, each mixed with its
position. It is exact, whatever order they are summed in, and another one for every change of a
single word.
"""

from __future__ import annotations

import functools
import itertools
import operator
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher.arrays.stacked_array import with_rows, with_stacks
from launcher.partition import axes
from launcher.runtime.throttle import Throttle
from launcher.runtime.transport.transfer import boxes, is_here

_GOLDEN, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35  # the last two are MurmurHash3's
_PARTS, _LARGE = 8, 2**16


@dataclass(frozen=True)
class Copies:
    """Digests of replicated arrays, as plain data.

    Attributes:
        names: the arrays' names.
        rows: int64 [copies, 5]: the array's index, a number that all copies of one part of it
            share, the number of the copy's device as a plan counts them, of its process, and the
            digest.
    """

    names: tuple[str, ...]
    rows: np.ndarray


class Digester:
    """Makes digests of the replicated leaves of a pytree, again and again.

    Leaves of which no part lies on several devices are left out, and so are those of other
    processes.

    Args:
        like: the pytree, of arrays or of `jax.ShapeDtypeStruct` with their shardings.
        gathered: whether each process gets the digests of all devices of its meshes; then all of
            those processes must call it. Otherwise a process gets those of its own devices.
        rank: the number of this worker where each holds replicas of what the others hold, and JAX
            knows of none but its own; None where JAX knows all of them.
    """

    def __init__(self, like: Any, gathered: bool = False, rank: int | None = None) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(with_rows(like))
        where: dict[Mesh, list[int]] = {}
        for i, (_, leaf) in enumerate(leaves):
            if is_replicated(leaf, rank) and is_here(leaf.sharding):
                where.setdefault(leaf.sharding.mesh, []).append(i)
        self._gathered = gathered
        self._places = list(where.values())
        order = [i for places in self._places for i in places]
        self._names = tuple(leaf_name(leaves[i][0]) for i in order)
        shapes = {i: _shape(leaves[i][1]) for i in order}
        with ThreadPoolExecutor() as pool:
            made = {kind: pool.submit(_program, kind) for kind in set(shapes.values())}
            joins = [pool.submit(_join, mesh, len(at), gathered) for mesh, at in where.items()]
            throttle, mesh_of = Throttle(), {i: mesh for mesh, at in where.items() for i in at}
            self._programs = {
                i: throttle.wrap(made[shapes[i]].result(), mesh_of[i].local_devices) for i in order
            }
            self._joins = [
                throttle.wrap(join.result(), mesh.local_devices)
                for mesh, join in zip(where, joins, strict=True)
            ]
        self._tables = [
            _table(mesh, [leaves[i][1] for i in places], order.index(places[0]), rank)
            for mesh, places in where.items()
        ]

    def start(self, tree: Any) -> list[jax.Array]:
        """Start to make the digests of a pytree like the one given before.

        On several CPU devices of this process it waits for the pytree (`Throttle`).
        """
        leaves = jax.tree.leaves(with_rows(tree))
        return [
            join(*(self._programs[i](leaves[i]) for i in places))
            for join, places in zip(self._joins, self._places, strict=True)
        ]

    def finish(self, started: Sequence[jax.Array]) -> Copies:
        """Wait for what `start` returned and return the digests."""
        found = [np.empty((0, 5), np.int64)]
        for made, table in zip(started, self._tables, strict=True):
            shards = made.addressable_shards[: 1 if self._gathered else None]
            for shard in shards:
                rows = table[shard.index[:-1]].copy()
                rows[..., 4] = np.asarray(shard.data)
                found.append(rows.reshape(-1, 5))
        return Copies(self._names, np.concatenate(found))


def leaf_name(path: Any) -> str:
    """Return the path of a leaf as it is shown, such as `params.layers_0.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_replicated(leaf: Any, rank: int | None = None) -> bool:
    """Return whether several devices hold the same part of an array, or a `ShapeDtypeStruct`.

    With a `rank`, as of `Digester`, other workers hold it as well.
    """
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return False
    if rank is not None:
        return True
    tiles = boxes(leaf.shape, sharding)
    return len(set(tiles.values())) < len(tiles)


def place_of(device: jax.Device, rank: int | None) -> tuple[int, int]:
    """Return the numbers of a device and of its process, as a plan counts them."""
    every = jax.devices()
    if rank is None:
        return every.index(device), device.process_index
    return rank * len(every) + every.index(device), rank


def to_words(value: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32, with further axes where an element has several."""
    dtype = value.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return to_words(jnp.stack([value.real, value.imag], -1))
    if _is_narrow(dtype):
        value = value.astype(jnp.float32)  # which holds all of its values
    bits = min(8 * value.dtype.itemsize, 32)
    return jax.lax.bitcast_convert_type(value, f"uint{bits}").astype(jnp.uint32)


def from_words(words: jax.Array, dtype: Any) -> jax.Array:
    """Return the array of this dtype of which `to_words` made the words."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = from_words(words, jnp.finfo(dtype).dtype)
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    if _is_narrow(dtype):
        return from_words(words, jnp.float32).astype(dtype)
    bits = min(8 * jnp.dtype(dtype).itemsize, 32)
    return jax.lax.bitcast_convert_type(words.astype(f"uint{bits}"), dtype)


def _is_narrow(dtype: Any) -> bool:
    """Return whether elements have fewer than 8 bits."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    known = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return known(dtype).bits < 8


def _digest(value: jax.Array) -> jax.Array:
    """Return the digest of an array, uint32 []."""
    words = to_words(value)
    words = words.reshape(1) if not words.ndim else words
    axis = int(np.argmax(words.shape))
    size = words.shape[axis]
    # Large arrays are added up in parts: XLA makes no vector instructions of a sum of integers on
    # CPUs, and does of one of arrays (0.4 ns a word instead of 1.1, or of 4 beside other arrays).
    length = size // _PARTS if words.size >= _LARGE else 0
    ends = [length * part for part in range(_PARTS + 1)] if length else [0]
    parts = [_mixed(words, axis, start, stop) for start, stop in itertools.pairwise(ends)]
    total = jnp.zeros((), jnp.uint32)
    if parts:
        total += jnp.sum(functools.reduce(operator.add, parts), dtype=jnp.uint32)
    if ends[-1] < size:
        total += jnp.sum(_mixed(words, axis, ends[-1], size), dtype=jnp.uint32)
    return total


def _mixed(words: jax.Array, axis: int, start: int, stop: int) -> jax.Array:
    """Return the words from `start` to `stop` along an axis, each mixed with its position."""
    part = jax.lax.slice_in_dim(words, start, stop, axis=axis)
    position = jnp.zeros(part.shape, jnp.uint32)
    for d, size in enumerate(words.shape):
        place = jax.lax.broadcasted_iota(jnp.uint32, part.shape, d)
        first = start if d == axis else 0
        position = position * np.uint32(size % 2**32) + (place + np.uint32(first))
    part ^= position * np.uint32(_GOLDEN)
    part = (part ^ (part >> 16)) * np.uint32(_FIRST)
    part = (part ^ (part >> 13)) * np.uint32(_SECOND)
    return part ^ (part >> 16)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _program(like: jax.ShapeDtypeStruct) -> Any:
    """Return the compiled program from an array to its digest on each device, uint32 `[*mesh]`.

    Leaves of one kind have one program: one of all leaves takes minutes to compile.
    """
    mesh, spec = like.sharding.mesh, like.sharding.spec

    def local(tile: jax.Array) -> jax.Array:
        return _digest(tile).reshape([1] * mesh.devices.ndim)

    def program(array: jax.Array) -> jax.Array:
        out = PartitionSpec(*mesh.axis_names)
        # Whether replicas hold the same is the question, so nothing may be made of it.
        every = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False)
        return every(_data(array))

    return jax.jit(program).lower(like).compile()


def _join(mesh: Mesh, count: int, gathered: bool) -> Any:
    """Return the compiled program that stacks the digests of arrays, uint32 `[*mesh, arrays]`."""
    each = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    like = jax.ShapeDtypeStruct(mesh.devices.shape, jnp.uint32, sharding=each)
    join = jax.jit(
        lambda *digests: jnp.stack(digests, -1),
        out_shardings=NamedSharding(mesh, PartitionSpec()) if gathered else each,
    )
    return join.lower(*[like] * count).compile()


def _data(array: jax.Array) -> jax.Array:
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def _table(mesh: Mesh, like: Sequence[Any], first: int, rank: int | None) -> np.ndarray:
    """Return the rows of `Copies` for arrays on a mesh, but for digests: `[*mesh, arrays, 5]`."""
    places = [place_of(device, rank) for device in mesh.devices.flat]
    table = np.zeros((mesh.devices.size, len(like), 5), np.int64)
    for j, leaf in enumerate(like):
        tiles = boxes(leaf.shape, leaf.sharding)
        parts = {box: part for part, box in enumerate(dict.fromkeys(tiles.values()))}
        for d, device in enumerate(mesh.devices.flat):
            part = parts[tiles[device.id]]
            table[d, j, :4] = first + j, part, *places[d]
    return table.reshape(*mesh.devices.shape, len(like), 5)


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
