"""Read checkpoints: each process reads only the shards that its devices need.

A damaged checkpoint must not get here: `choose` rejects it before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from launcher.arrays.npz import Header
from launcher.arrays.stacked_array import StackedArray, sharding_of
from launcher.base import DamagedError
from launcher.checkpoint.flat import (
    Mismatch,
    Source,
    absent_like,
    can_take,
    find_weights,
    mismatch,
    names_of,
    read_flat,
    sources,
)
from launcher.checkpoint.layout import ARRAYS
from launcher.checkpoint.orbax_compat import PLACEHOLDER, read_tree, stored_tree
from launcher.checkpoint.train_state import MODEL_PARTS, RECENT, TrainState, flat_name
from launcher.checkpoint.write import stored_parts
from launcher.recipes import InputError

_MESSAGE_LIMIT = 200  # characters
_MOST_NAMED = 5


def restore(folder: Path, step: int, like: TrainState) -> TrainState:
    """Read the state of `folder/<step>`, each array straight to its sharding.

    Every process may call it alone. An array with no part on this process's devices is not read.

    Args:
        folder: the folder of checkpoints.
        step: the step.
        like: the state's shapes, a tree of `jax.ShapeDtypeStruct` with shardings.

    Raises:
        FileNotFoundError: there is no such step.
        InputError: a stored array has another shape.
    """
    path = folder / str(step)
    try:
        return replace(like, **restore_parts(path, stored_parts(like)))
    except ValueError:  # the shapes are not looked at before: a resume is not to wait for that
        try:
            check_state(path, like)
        except Mismatch as error:
            raise InputError(f"the run cannot resume from {path}: {error}") from None
        if (RECENT in stored_tree_of(path)) == (like.recent is not None):
            raise
    return _restored_but_recent(path, like)


def _restored_but_recent(path: Path, like: TrainState) -> TrainState:
    """Read a state of a run whose `train.spikes` has been turned on or off since; raise OSError."""
    parts = stored_parts(replace(like, recent=None))
    if like.recent is None:
        stored = stored_tree_of(path)[RECENT]
        read = restore_parts(path, {**parts, RECENT: jax.tree.map(lambda _: PLACEHOLDER, stored)})
        return replace(like, **{name: read[name] for name in parts})
    unknown = jax.jit(
        lambda: jax.numpy.full(like.recent.shape, np.nan, like.recent.dtype),
        out_shardings=sharding_of(like.recent),
    )
    return replace(like, **restore_parts(path, parts), recent=unknown())


def restore_model(path: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Read these parts of a checkpoint, or of another program's files, sharded as `like` says.

    Layers may be stacked in one of them and apart in the other (`flat.sources`).
    """
    if weights := find_weights(path):
        return read_flat(weights, like)
    stored, wanted = stored_tree_of(path), leaves_of(like)
    found = sources(leaf_shapes(wanted), leaf_shapes(leaves_of(stored)))
    specs = _specs(wanted, found)
    read = restore_parts(
        path,
        jax.tree_util.tree_map_with_path(
            lambda where, _: specs.get(flat_name(where), PLACEHOLDER), stored
        ),
    )
    values = leaves_of(read)
    return dict(
        jax.tree_util.tree_map_with_path(
            lambda where, leaf: _assembled(leaf, found[flat_name(where)], values), dict(like)
        )
    )


def stored_shapes(path: Path) -> dict[str, Any]:
    """Return what describes each array of the checkpoint `path`, by its flat name.

    Raises:
        Mismatch: Orbax cannot read it.
    """
    return leaves_of(stored_tree_of(path))


def check_model(path: Path, like: Mapping[str, Any]) -> None:
    """Check that a stored model has the names and shapes of `like`; read no array.

    Args:
        path: a checkpoint, or files as `find_weights` reads them.
        like: the model's parts (`TrainState.model`), trees of `jax.ShapeDtypeStruct`.

    Raises:
        Mismatch: they differ, or it cannot be read.
    """
    stored, wanted = _stored_leaves(path), leaves_of(like)
    found = sources(leaf_shapes(wanted), leaf_shapes(stored))
    if missing := sorted(wanted.keys() - found.keys()):
        raise Mismatch(f"it has no {first_of(missing)}, which the model has")
    used = {name for source in found.values() for name in names_of(source)}
    if further := sorted(stored.keys() - used):
        raise Mismatch(f"it has {first_of(further)}, which the model does not have")
    for name, leaf in wanted.items():
        one, source = stored[names_of(found[name])[0]], found[name]
        shape = tuple(one.shape)
        if not isinstance(source, str):
            shape = shape[1:] if isinstance(source[1], int) else (len(source), *shape)
        if shape != leaf.shape:
            raise Mismatch(mismatch(name, shape, leaf.shape, "in the model"))
        if isinstance(source, tuple) and isinstance(source[1], int):
            _check_all_rows(source[0], one.shape[0], found)
        if isinstance(one, Header) and not can_take(leaf.dtype, one.dtype):
            raise Mismatch(f"{name} is of type {one.dtype} there and {leaf.dtype} in the model")


def check_state(path: Path, like: TrainState) -> None:
    """Check that the checkpoint `path` holds the arrays of a state but `recent`; read none.

    Raises:
        Mismatch: names or shapes differ, or it cannot be read.
    """
    stored, wanted = leaf_shapes(stored_shapes(path)), leaf_shapes(leaves_of(stored_parts(like)))
    for name in sorted((wanted.keys() | stored.keys()) - {RECENT}):
        there, here = stored.get(name, "missing"), wanted.get(name, "missing")
        if there != here:
            raise Mismatch(mismatch(name, there, here, "here"))


def check_vocabulary(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a stored model's vocabulary is padded where that of these settings is.

    Args:
        model: the settings of its section.
        shapes: the shapes of its arrays, by their flat names.

    Raises:
        Mismatch: it is not.
    """
    name = "params.word_embeddings.embedding"
    if model.vocabulary_rows and name in shapes:
        here = (model.vocabulary_rows, *shapes[name][1:])
        if shapes[name] != here:
            raise Mismatch(mismatch(name, shapes[name], here, "in the model"))


def _stored_leaves(path: Path) -> dict[str, Any]:
    """Return what describes each stored array of the model, by its flat name."""
    if weights := find_weights(path):
        try:
            return dict(weights.headers())
        except DamagedError as error:
            raise Mismatch(str(error)) from None
    tree = stored_tree_of(path)
    return leaves_of({name: tree[name] for name in MODEL_PARTS if name in tree})


def _check_all_rows(name: Any, count: int, found: Mapping[str, Source]) -> None:
    """Raise Mismatch if the model has not a layer for each row of a stored array."""
    rows = sum(source[0] == name for source in found.values() if not isinstance(source, str))
    if rows != count:
        raise Mismatch(f"{name} holds {count} layers there, and the model has {rows}")


def leaf_shapes(leaves: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each leaf."""
    return {name: tuple(leaf.shape) for name, leaf in leaves.items()}


def _specs(wanted: Mapping[str, Any], found: Mapping[str, Source]) -> dict[str, Any]:
    """Return how each stored array is to be read, by its name."""
    specs: dict[str, Any] = {}
    apart: dict[str, dict[int, Any]] = {}
    for name, leaf in wanted.items():
        source = found[name]
        if isinstance(source, str):
            specs[source] = leaf
        elif isinstance(source[1], int):
            apart.setdefault(str(source[0]), {})[source[1]] = leaf
        elif isinstance(leaf, StackedArray):
            specs.update(zip(names_of(source), leaf.rows, strict=True))
        elif _is_here(leaf):
            row = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
            specs.update(dict.fromkeys(names_of(source), row))
    for name, rows in apart.items():
        specs[name] = StackedArray([rows[i] for i in sorted(rows)])
    return specs


def _assembled(leaf: Any, source: Source, values: Mapping[str, Any]) -> Any:
    """Return an array as it is wanted, of what was read."""
    if isinstance(source, str):
        return values[source]
    if isinstance(source[1], int):
        return values[str(source[0])].rows[source[1]]
    rows = [values.get(name) for name in names_of(source)]
    if isinstance(leaf, StackedArray):
        return StackedArray(rows)
    if not _is_here(leaf):
        return absent_like(leaf)
    value = np.stack([np.asarray(row) for row in rows])
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])


def first_of(names: list[str]) -> str:
    """Return the first of these names, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def stored_tree_of(path: Path) -> Any:
    """Return Orbax's metadata of the arrays as a tree; raise Mismatch if it cannot be read."""
    try:
        return stored_tree(path.absolute() / ARRAYS)
    except Exception as error:  # of any type, if another program has written it
        message = " ".join(str(error).split())[:_MESSAGE_LIMIT]
        raise Mismatch(f"Orbax cannot read it ({type(error).__name__}: {message})") from None


def leaves_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a model's parts by their flat names."""
    flat = jax.tree_util.tree_flatten_with_path(parts)[0]
    return dict(sorted((flat_name(path), leaf) for path, leaf in flat))


def restore_parts(path: Path, tree: Any) -> Any:
    """Read the leaves of the checkpoint `path` that have a part here; empty where one has none.

    Args:
        path: the checkpoint.
        tree: trees of `jax.ShapeDtypeStruct`, by the names that they are stored under; one that has
            no sharding is read as a NumPy array, and a `PLACEHOLDER` is not read.
    """
    arrays = path.absolute() / ARRAYS
    if not arrays.is_dir():
        raise FileNotFoundError(f"{arrays} is not there")
    wanted = jax.tree.map(lambda leaf: leaf if _is_here(leaf) else PLACEHOLDER, tree)

    def placed(leaf: Any, value: Any) -> Any:
        if leaf is PLACEHOLDER:
            return None
        return value if _is_here(leaf) else absent_like(leaf)

    return jax.tree.map(placed, tree, read_tree(arrays, wanted))


def _is_here(leaf: Any) -> bool:
    if leaf is PLACEHOLDER:
        return False
    where = sharding_of(leaf)
    return where is None or bool(where.addressable_devices)
