"""A model's arrays by flat names such as `params.layers_0.kernel`, from files and to one.

Files that are no checkpoints are an `.npz` or a folder of Hugging Face's, whatever the names in it.
Any program with NumPy reads the `.npz` file that is written. Types that NumPy lacks (bfloat16)
stand there in the next wider one, which changes no value.

A model that scans its layers has `layers.kernel`, with a row a layer, where the same model that
runs them one after the other has `layers_0.kernel`, `layers_1.kernel` and so on. Each starts from
what the other has saved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from launcher.arrays.npz import Header, read_arrays, read_headers, write_arrays
from launcher.arrays.stacked_array import StackedArray, sharding_of
from launcher.checkpoint.hugging_face import find_hugging_face
from launcher.checkpoint.train_state import MODEL_PARTS, flat_name
from launcher.recipes.models.hugging_face import padded

Arrays = Callable[[str], np.ndarray]  # an array by its flat name
_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)  # each holds those before it
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
# A name; the names of all rows, in order; or a name and the number of its row.
Source: TypeAlias = "str | tuple[str, ...] | tuple[str, int]"
_NUMBERED = re.compile(r"(?:(.+)_)?(\d+)")


class Mismatch(Exception):
    """What is stored does not fit the model, or cannot be named; the text is a few words."""


_UNPADDED = (
    " (a vocabulary that an earlier version did not pad: task=export export.format=hf of that run, "
    "and train.init_from=hf:<folder> in a new one, take it over)"
)


def mismatch(name: str, there: Any, here: Any, where: str) -> str:
    """Return in words that an array has another shape there than here, or is missing in one."""
    pairs = zip(there, here, strict=False) if isinstance(there, tuple) else ()
    is_padding = [n if n == m else padded(n) for n, m in pairs] == list(here)
    return f"{name} is {there} there and {here} {where}{_UNPADDED if is_padding else ''}"


class Weights(Protocol):
    """The model's arrays in files of another kind than ours.

    Its methods raise OSError where a file cannot be read, and DamagedError where it does not hold
    what it should.
    """

    def headers(self) -> dict[str, Header]:
        """Return the shape and type of each array, by its flat name; read no array."""

    def opened(self, names: Sequence[str]) -> AbstractContextManager[Arrays]:
        """Open the files of these arrays; each is read when it is asked for."""


def find_weights(path: Path) -> Weights | None:
    """Return the arrays that are at a path; None for a folder of checkpoints."""
    if not path.is_dir():
        return _Npz(path)
    return find_hugging_face(path)


class _Npz:
    """One `.npz` file; other arrays in it, such as a dataset's, are left alone."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def headers(self) -> dict[str, Header]:
        headers = read_headers(self._path)
        return {name: one for name, one in headers.items() if name.split(".")[0] in MODEL_PARTS}

    def opened(self, names: Sequence[str]) -> AbstractContextManager[Arrays]:
        return nullcontext(read_arrays(self._path, names).__getitem__)  # a file is unpacked whole


def can_take(wanted: Any, stored: np.dtype) -> bool:
    """Return whether an array of type `stored` may be converted to `wanted`, JAX's of a leaf."""
    ranks = [
        next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), None)
        for dtype in (stored, wanted)
    ]
    return None not in ranks and ranks[0] <= ranks[1]  # type: ignore[operator]


def read_flat(weights: Weights, like: Mapping[str, Any]) -> dict[str, Any]:
    """Read a model's parts from files, converted to the types of `like` and sharded as it says.

    Of arrays without a part on this process's devices nothing is read, and the others are read one
    after the other.

    Args:
        weights: the files.
        like: the model's parts (`TrainState.model`), trees of `jax.ShapeDtypeStruct` with
            shardings.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(like)
    shapes = {flat_name(where): tuple(leaf.shape) for where, leaf in leaves}
    here = {flat_name(where) for where, leaf in leaves if sharding_of(leaf).addressable_devices}
    stored = {name: tuple(one.shape) for name, one in weights.headers().items()}
    found = {name: at for name, at in sources(shapes, stored).items() if name in here}
    needed = dict.fromkeys(name for source in found.values() for name in names_of(source))
    with weights.opened(list(needed)) as read:
        placed = [_placed(read, found.get(flat_name(where)), leaf) for where, leaf in leaves]
    return dict(jax.tree.unflatten(tree, placed))


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
        Mismatch: two arrays would have one name.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, array in _named(parts):
        if name in arrays:
            raise Mismatch(f"two of its arrays would be named {name}")
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


def value_of(read: Arrays, source: Source) -> np.ndarray:
    """Return an array, of where it is stored."""
    if isinstance(source, str):
        return read(source)
    if isinstance(source[1], int):
        row: np.ndarray = read(str(source[0]))[source[1]]
        return row
    return np.stack([read(name) for name in names_of(source)])


def _placed(read: Arrays, source: Source | None, leaf: Any) -> Any:
    if source is None:
        return absent_like(leaf)
    if not isinstance(leaf, StackedArray):
        return _at(value_of(read, source), leaf)
    if isinstance(source, tuple) and not isinstance(source[1], int):  # a layer at a time
        rows: Iterable[np.ndarray] = (read(name) for name in names_of(source))
    else:
        rows = value_of(read, source)
    return StackedArray([_at(*each) for each in zip(rows, leaf.rows, strict=True)])


def _at(value: np.ndarray, leaf: Any) -> jax.Array:
    return jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: value[index].astype(leaf.dtype)
    )


def absent_like(leaf: Any) -> Any:
    """Return an array with the shape and sharding of `leaf`, without a part in this process."""
    if isinstance(leaf, StackedArray):
        return StackedArray([absent_like(row) for row in leaf.rows])
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [], dtype=leaf.dtype)


def sources(wanted: Shapes, stored: Shapes) -> dict[str, Source]:
    """Return for each wanted array where it is stored; nothing for those that are not.

    Args:
        wanted: the shapes of a model's arrays, by flat names such as `params.layers_0.kernel`.
        stored: the shapes of what is stored.
    """
    found: dict[str, Source] = {}
    for name, shape in wanted.items():
        if name in stored:
            found[name] = name
        elif source := _rows(name, shape, stored) or _row(name, shape, stored):
            found[name] = source
    return found


def names_of(source: Source) -> tuple[str, ...]:
    """Return the names of the stored arrays of a source."""
    if isinstance(source, str):
        return (source,)
    return tuple(name for name in source if isinstance(name, str))


def _rows(name: str, shape: tuple[int, ...], stored: Shapes) -> tuple[str, ...] | None:
    """Return the names of the rows of a stacked array, if each is stored apart."""
    for numbered in _with_numbers(name):
        rows = tuple(numbered.format(i) for i in range(shape[0] if shape else 0))
        further = numbered.format(len(rows))
        if rows and further not in stored and all(stored.get(row) == shape[1:] for row in rows):
            return rows
    return None


def _with_numbers(name: str) -> Iterator[str]:
    """Yield a name with a place for a number behind each of its parts but the first and last.

    It is the end of the part, as in Flax, or a part of its own, as in lists.
    """
    parts = name.replace("{", "{{").replace("}", "}}").split(".")
    for i in range(1, len(parts) - 1):
        for mark in "_.":
            yield ".".join([*parts[:i], f"{parts[i]}{mark}{{}}", *parts[i + 1 :]])


def _row(name: str, shape: tuple[int, ...], stored: Shapes) -> tuple[str, int] | None:
    """Return the stacked array of which an array is a row, and the row's number."""
    parts = name.split(".")
    for i in range(1, len(parts) - 1):
        if found := _NUMBERED.fullmatch(parts[i]):
            before = [found[1]] if found[1] else []
            stacked = ".".join([*parts[:i], *before, *parts[i + 1 :]])
            count, *of_row = stored.get(stacked) or (0,)
            if int(found[2]) < count and tuple(of_row) == shape:
                return stacked, int(found[2])
    return None
