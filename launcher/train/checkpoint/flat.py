"""A model's arrays in one `.npz` file, by flat names such as `params.layers_0.kernel`.

Any program with NumPy writes and reads such a file. Types that NumPy lacks (bfloat16) stand there
in the next wider one, which changes no value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launcher.files import DamagedError
from launcher.npz import Header, read_arrays, read_headers, write_arrays
from launcher.stacked_array import StackedArray, sharding_of
from launcher.train.checkpoint.layers import Source, names_of, sources
from launcher.train.step import MODEL_PARTS

_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)  # each holds those before it


def flat_name(path: Any) -> str:
    """Return the name of a leaf, of its path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def flat_headers(path: Path) -> dict[str, Header]:
    """Return the shapes and types of the model's arrays in a file, by their flat names.

    Other arrays in it, such as a dataset's, are left alone. It raises the errors of `read_headers`.
    """
    headers = read_headers(path)
    return {name: one for name, one in headers.items() if name.split(".")[0] in MODEL_PARTS}


def can_take(wanted: Any, stored: np.dtype) -> bool:
    """Return whether an array of type `stored` may be converted to `wanted`, JAX's of a leaf."""
    ranks = [
        next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), None)
        for dtype in (stored, wanted)
    ]
    return None not in ranks and ranks[0] <= ranks[1]  # type: ignore[operator]


def read_flat(path: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Read a model's parts from a file, converted to the types of `like` and sharded as it says.

    Of arrays without a part on this process's devices nothing is read.

    Args:
        path: the file.
        like: the model's parts (`TrainState.model`), trees of `jax.ShapeDtypeStruct` with
            shardings.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(like)
    shapes = {flat_name(where): tuple(leaf.shape) for where, leaf in leaves}
    here = {flat_name(where) for where, leaf in leaves if sharding_of(leaf).addressable_devices}
    stored = {name: tuple(one.shape) for name, one in flat_headers(path).items()}
    found = {name: at for name, at in sources(shapes, stored).items() if name in here}
    needed = dict.fromkeys(name for source in found.values() for name in names_of(source))
    read = read_arrays(path, list(needed))
    values = {name: _value(read, source) for name, source in found.items()}
    return dict(jax.tree.unflatten(tree, [_placed(values, *leaf) for leaf in leaves]))


def write_flat(path: Path, parts: Mapping[str, Any], private: bool) -> int:
    """Write a model's parts, trees of NumPy arrays, to a file; whole or not at all.

    Args:
        path: the file.
        parts: the model's parts (`TrainState.model`).
        private: whether only this user may read it; otherwise the umask decides.

    Returns:
        The number of arrays.

    Raises:
        OSError: it cannot be written; the error names the file.
        DamagedError: two arrays would have one name.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, array in _named(parts):
        if name in arrays:
            raise DamagedError(f"two of its arrays would be named {name}")
        arrays[name] = array
    write_arrays(path, arrays, private)
    return len(arrays)


def _named(parts: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(parts):
        array = np.asarray(leaf)
        if array.dtype.isbuiltin != 1:  # one of JAX's own types
            floating = jnp.issubdtype(array.dtype, jnp.floating)
            array = array.astype(np.float32 if floating else np.int8)
        yield flat_name(path), array


def _value(read: Mapping[str, np.ndarray], source: Source) -> np.ndarray:
    if isinstance(source, str):
        return read[source]
    if isinstance(source[1], int):
        return read[str(source[0])][source[1]]
    return np.stack([read[name] for name in names_of(source)])


def _placed(values: Mapping[str, np.ndarray], path: Any, leaf: Any) -> Any:
    value = values.get(flat_name(path))
    if isinstance(leaf, StackedArray):
        rows = [None] * len(leaf.rows) if value is None else value
        return StackedArray([_at(*each) for each in zip(rows, leaf.rows, strict=True)])
    return _at(value, leaf)


def _at(value: np.ndarray | None, leaf: Any) -> jax.Array:
    """Return an array where its shape `leaf` says, without parts if it has no value here."""
    if value is None:
        return jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, [], dtype=leaf.dtype
        )
    return jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: value[index].astype(leaf.dtype)
    )
