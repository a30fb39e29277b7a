"""Digests of what each device holds of an array, made where it lies.

A digest is a sum of 32-bit words, each mixed with its position: exact, whatever order they are
summed in, and another one for every change of a single word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher.runtime.transfer import boxes, is_here

_GOLDEN, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35  # the last two are MurmurHash3's


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
    """

    def __init__(self, like: Any, gathered: bool = False) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(like)
        where: dict[Mesh, list[int]] = {}
        for i, (_, leaf) in enumerate(leaves):
            if is_replicated(leaf) and is_here(leaf.sharding):
                where.setdefault(leaf.sharding.mesh, []).append(i)
        self._gathered = gathered
        self._places = list(where.values())
        order = [i for places in self._places for i in places]
        self._names = tuple(leaf_name(leaves[i][0]) for i in order)
        self._programs, self._tables = [], []
        for mesh, places in where.items():
            on_mesh = [leaves[i][1] for i in places]
            self._programs.append(_program(mesh, on_mesh, gathered))
            self._tables.append(_table(mesh, on_mesh, order.index(places[0])))

    def start(self, tree: Any) -> list[jax.Array]:
        """Start to make the digests of a pytree like the one given before; wait for nothing."""
        leaves = jax.tree.leaves(tree)
        pairs = zip(self._programs, self._places, strict=True)
        return [program(*(leaves[i] for i in places)) for program, places in pairs]

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


def is_replicated(leaf: Any) -> bool:
    """Return whether several devices hold the same part of an array, or a `ShapeDtypeStruct`."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or len(sharding.device_set) == 1:
        return False
    tiles = boxes(leaf.shape, sharding)
    return len(set(tiles.values())) < len(tiles)


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
    found = to_words(value)
    position = jnp.zeros(found.shape, jnp.uint32)
    for axis, size in enumerate(found.shape):
        place = jax.lax.broadcasted_iota(jnp.uint32, found.shape, axis)
        position = position * np.uint32(size % 2**32) + place
    found ^= position * np.uint32(_GOLDEN)
    found = (found ^ (found >> 16)) * np.uint32(_FIRST)
    found = (found ^ (found >> 13)) * np.uint32(_SECOND)
    return jnp.sum(found ^ (found >> 16), dtype=jnp.uint32)


def _program(mesh: Mesh, like: Sequence[Any], gathered: bool) -> Any:
    """Return the compiled program from arrays on a mesh to uint32 `[*mesh, arrays]`."""
    axes = mesh.axis_names

    def local(*tiles: jax.Array) -> jax.Array:
        return jnp.stack([_digest(tile) for tile in tiles]).reshape(*[1] * len(axes), -1)

    def program(*arrays: jax.Array) -> jax.Array:
        plain = [_data(array) for array in arrays]
        specs = tuple(x.sharding.spec for x in like)
        # Whether replicas hold the same is the question, so nothing may be made of it.
        every = jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(*axes), check_vma=False
        )
        return every(*plain)

    out = NamedSharding(mesh, PartitionSpec(*([] if gathered else axes)))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in like]
    return jax.jit(program, out_shardings=out).lower(*shapes).compile()


def _data(array: jax.Array) -> jax.Array:
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def _table(mesh: Mesh, like: Sequence[Any], first: int) -> np.ndarray:
    """Return the rows of `Copies` for arrays on a mesh, but for digests: `[*mesh, arrays, 5]`."""
    number = {device: i for i, device in enumerate(jax.devices())}
    table = np.zeros((mesh.devices.size, len(like), 5), np.int64)
    for j, leaf in enumerate(like):
        tiles = boxes(leaf.shape, leaf.sharding)
        parts = {box: part for part, box in enumerate(dict.fromkeys(tiles.values()))}
        for d, device in enumerate(mesh.devices.flat):
            part = parts[tiles[device.id]]
            table[d, j, :4] = first + j, part, number[device], device.process_index
    return table.reshape(*mesh.devices.shape, len(like), 5)
