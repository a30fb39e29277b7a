"""A process's own copies of arrays, and calls of a user's function on them.

A worker runs it on the arrays that it holds; a session without workers runs it on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

Scope = Literal["worker", "replicas", "first"]


def call_here(
    fun: Callable[..., Any],
    trees: Sequence[Any],
    scope: Scope,
    devices: Sequence[jax.Device],
    *,
    is_first: bool = True,
) -> list[Any]:
    """Return what `fun` returns on this process's own copies of the trees' arrays.

    Args:
        fun: the function.
        trees: its arguments.
        scope: whether it is called once for this process ("worker"), once for each device
            ("replicas"), or once for the first device of all ("first").
        devices: the devices of this process.
        is_first: whether this is the first process.

    Returns:
        What each call returned, in order; arrays of JAX in it become NumPy arrays.

    Raises:
        Exception: what `fun` raises, with a note that names the device.
    """
    if scope == "worker":
        return [plain(fun(*jax.tree.map(_of_process, tuple(trees))))]
    if scope == "first":
        devices = devices[:1] if is_first else ()
    number = {device: i for i, device in enumerate(jax.devices())}
    results = []
    for device in devices:
        own = jax.tree.map(lambda leaf, d=device: _of_device(leaf, d), tuple(trees))
        try:
            with jax.default_device(device):
                results.append(plain(fun(*own)))
        except Exception as error:
            error.add_note(f"This was the call for device {number[device]}.")
            raise
    return results


def plain(tree: Any) -> Any:
    """Return a pytree with NumPy arrays in place of JAX's; typed random keys stay as they are."""

    def as_numpy(leaf: Any) -> Any:
        return np.asarray(leaf) if isinstance(leaf, jax.Array) and not is_key(leaf.dtype) else leaf

    return jax.tree.map(as_numpy, tree)


def is_key(dtype: Any) -> bool:
    """Return whether a dtype is that of typed random keys."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def _of_process(leaf: Any) -> Any:
    """Return the part of an array that lies in this process, as an array of its own."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    shards = leaf.addressable_shards
    if not shards:
        return None
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    assert isinstance(sharding.mesh, Mesh)
    if not _is_block(sharding.mesh.devices):
        return slice_of([(shard.index, shard.data) for shard in shards])
    own = NamedSharding(sharding.mesh.local_mesh, sharding.spec)
    # As many shards along each axis as the process's part of the mesh has there.
    counts = [1] * leaf.ndim
    for axis, names in enumerate(sharding.spec):
        for name in (names,) if isinstance(names, str) else names or ():
            counts[axis] *= own.mesh.shape[name]
    shape = tuple(n * size for n, size in zip(counts, shards[0].data.shape, strict=True))
    return jax.make_array_from_single_device_arrays(shape, own, [shard.data for shard in shards])


def _is_block(devices: np.ndarray) -> bool:
    """Return whether this process's devices in a mesh are all those of some rows and columns."""
    processes = np.reshape([d.process_index for d in devices.flat], devices.shape)
    places = np.argwhere(processes == jax.process_index())
    return len(places) == math.prod(len(set(along)) for along in places.T)


def slice_of(shards: Sequence[tuple[tuple[slice, ...], jax.Array]]) -> jax.Array:
    """Return the slice of an array that shards of it make together, on the first one's device.

    Args:
        shards: the place of each in the whole array, and its values; replicas may be among them.

    Raises:
        ValueError: together they are no slice.
    """
    by_place = {tuple(cut.start or 0 for cut in index): data for index, data in shards}
    starts = [sorted(set(along)) for along in zip(*by_place, strict=True)]
    if len(by_place) != math.prod(map(len, starts)):
        raise ValueError(
            "this worker's part of the array is not a slice of it, because its devices are not a "
            "block of the logical mesh; use launcher.foreach_replica"
        )
    (device,) = shards[0][1].devices()

    def part(above: tuple[int, ...]) -> jax.Array:
        axis = len(above)
        if axis == len(starts):
            moved: jax.Array = jax.device_put(by_place[above], device)
            return moved
        parts = [part((*above, start)) for start in starts[axis]]
        return parts[0] if len(parts) == 1 else jax.numpy.concatenate(parts, axis)

    return part(())


def _of_device(leaf: Any, device: jax.Device) -> Any:
    """Return the part of an array that lies on a device."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if not leaf.committed:  # it lies nowhere in particular: a value that the script has made
        return jax.device_put(leaf, device)
    return next((s.data for s in leaf.addressable_shards if s.device == device), None)
