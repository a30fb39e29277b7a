"""Reading a checkpoint: each process the arrays, and of those the parts, that its devices need.

A damaged one must not come here: `choose` sees to that beforehand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from jax.tree_util import keystr

from launcher.train.checkpoint.layout import ARRAYS
from launcher.train.checkpoint.orbax_compat import PLACEHOLDER, read_tree, stored_tree
from launcher.train.checkpoint.write import FIELDS
from launcher.train.step import TrainState

_SAID = 200  # characters


class Mismatch(Exception):
    """Stored parameters are not those of the model: which, in a few words."""


def restore(folder: Path, step: int, like: TrainState) -> TrainState:
    """Read `folder/<step>`.

    `like` holds a `jax.ShapeDtypeStruct` a leaf; each array goes straight to the sharding that it
    names. Every process may call it alone: of an array that has no place here nothing is read.
    Raises FileNotFoundError for a step that is not there and ValueError for other shapes.
    """
    tree = {name: getattr(like, name) for name in FIELDS}
    return TrainState(**_read(folder / str(step), tree))


def restore_params(path: Path, like: Any) -> Any:
    """The parameters of the checkpoint `path`, placed as `like` says; see `restore`."""
    stored = _stored(path)
    others = {name: tree for name, tree in stored.items() if name != "params"}
    tree = {**jax.tree.map(lambda _: PLACEHOLDER, others), "params": like}
    return _read(path, tree)["params"]


def check_params(path: Path, like: Any) -> None:
    """Raises Mismatch where the parameters of the checkpoint `path` are not of the names and the
    shapes of `like`, a tree of `jax.ShapeDtypeStruct`. Reads no array."""
    found = _stored(path)
    stored, wanted = _shapes(found.get("params", {})), _shapes(like)
    for name in wanted.keys() - stored.keys():
        raise Mismatch(f"it has no params{name}, which the model has")
    for name in stored.keys() - wanted.keys():
        raise Mismatch(f"it has params{name}, which the model has not")
    for name, shape in wanted.items():
        if stored[name] != shape:
            raise Mismatch(f"params{name} is {stored[name]} there and {shape} in the model")


def _stored(path: Path) -> Any:
    """What Orbax knows of the arrays of the checkpoint `path`, as a tree; raises Mismatch."""
    try:
        return stored_tree(path.absolute() / ARRAYS)
    except Exception as error:  # of any kind, where another program has written it
        told = " ".join(str(error).split())[:_SAID]
        raise Mismatch(f"Orbax cannot read it ({type(error).__name__}: {told})") from None


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {keystr(path): tuple(leaf.shape) for path, leaf in sorted(flat, key=str)}


def _read(path: Path, tree: Any) -> Any:
    """The stored tree: the leaves of `tree` that have a place here, placed; of the others nothing
    is read."""
    arrays = path.absolute() / ARRAYS
    if not arrays.is_dir():
        raise FileNotFoundError(f"{arrays} is not there")
    wanted = jax.tree.map(lambda leaf: leaf if _is_here(leaf) else PLACEHOLDER, tree)
    read = read_tree(arrays, wanted)
    return jax.tree.map(lambda leaf, value: value if _is_here(leaf) else _absent(leaf), tree, read)


def _is_here(leaf: Any) -> bool:
    if leaf is PLACEHOLDER:
        return False
    return leaf.sharding is None or bool(leaf.sharding.addressable_devices)


def _absent(leaf: Any) -> Any:
    """An array of which this process holds no part; nothing where none is wanted."""
    if leaf is PLACEHOLDER:
        return None
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [], dtype=leaf.dtype)
