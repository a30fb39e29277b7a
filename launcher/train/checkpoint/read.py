"""Reads checkpoints: each process the arrays, and the parts of them, that its devices need.

A damaged checkpoint must not get here: `choose` rejects it before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.tree_util import keystr

from launcher.train.checkpoint.layout import ARRAYS
from launcher.train.checkpoint.orbax_compat import PLACEHOLDER, read_tree, stored_tree
from launcher.train.checkpoint.write import stored_parts
from launcher.train.step import MODEL_PARTS, TrainState

_MESSAGE_LIMIT = 200  # characters


class Mismatch(Exception):
    """What is stored does not fit the model; the text is a few words."""


def restore(folder: Path, step: int, like: TrainState) -> TrainState:
    """Read the state of `folder/<step>`, each array straight to its sharding.

    Every process may call it alone. An array with no part on this process's devices is not read.

    Args:
        folder: the folder of checkpoints.
        step: the step.
        like: the state's shapes, a tree of `jax.ShapeDtypeStruct` with shardings.

    Raises:
        FileNotFoundError: there is no such step.
        ValueError: a stored array has another shape.
    """
    return replace(like, **_read(folder / str(step), stored_parts(like)))


def restore_model(path: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Read these parts of the checkpoint `path`, sharded as `like` says; see `restore`."""
    others = {name: tree for name, tree in _stored(path).items() if name not in like}
    read = _read(path, {**jax.tree.map(lambda _: PLACEHOLDER, others), **like})
    return {name: read[name] for name in like}


def check_model(path: Path, like: Mapping[str, Any]) -> None:
    """Check that a checkpoint's model has the names and shapes of `like`; read no array.

    Args:
        path: the checkpoint.
        like: the model's parts (`TrainState.model`), trees of `jax.ShapeDtypeStruct`.

    Raises:
        Mismatch: they differ, or Orbax cannot read them.
    """
    tree = _stored(path)
    stored = _shapes({name: tree[name] for name in MODEL_PARTS if name in tree})
    wanted = _shapes(like)
    for name in sorted(wanted.keys() - stored.keys()):
        raise Mismatch(f"it has no {name}, which the model has")
    for name in sorted(stored.keys() - wanted.keys()):
        raise Mismatch(f"it has {name}, which the model has not")
    for name, shape in wanted.items():
        if stored[name] != shape:
            raise Mismatch(f"{name} is {stored[name]} there and {shape} in the model")


def _stored(path: Path) -> Any:
    """Return Orbax's metadata of the arrays as a tree; raise Mismatch if it cannot be read."""
    try:
        return stored_tree(path.absolute() / ARRAYS)
    except Exception as error:  # of any type, if another program has written it
        message = " ".join(str(error).split())[:_MESSAGE_LIMIT]
        raise Mismatch(f"Orbax cannot read it ({type(error).__name__}: {message})") from None


def _shapes(tree: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parts' arrays by their names, such as `params['w']`."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {f"{path[0].key}{keystr(path[1:])}": tuple(leaf.shape) for path, leaf in flat}
    return dict(sorted(named.items()))


def _read(path: Path, tree: Any) -> Any:
    """Read the leaves of `tree` that have a part here; of the others nothing is read."""
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
    """Return an array of which this process holds no part; None for a `PLACEHOLDER`."""
    if leaf is PLACEHOLDER:
        return None
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [], dtype=leaf.dtype)
