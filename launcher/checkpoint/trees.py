"""`launcher.save` and `launcher.restore`: pytrees as checkpoints in a run's format.

After `launcher.init("ray")` each worker writes and reads its own shards, and no process holds the
whole. A leaf is stored under its path in the tree, whatever the classes of the tree are.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
import operator
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launcher import checkpoint
from launcher.api.ray_backend import RayBackend
from launcher.api.remote_array import RemoteArray
from launcher.api.session import current
from launcher.arrays.stacked_array import StackedArray, spec_at
from launcher.base import warn_once
from launcher.checkpoint.layout import CHECKSUMS, METADATA, is_step

_log = logging.getLogger(__name__)

_ALONE = "tree"  # the name of a tree that is one leaf
_Path = tuple[str, ...]


class RestoreError(ValueError):
    """An error raised when a folder holds no intact checkpoint, or one of another tree."""


def save(folder: str | os.PathLike[str], tree: Any) -> None:
    """Save a pytree of arrays as a checkpoint, completely or not at all, and wait for it.

    The format is that of a run's checkpoints, which stock Orbax reads. After `launcher.init("ray")`
    each worker writes its shards; all of them must see the folder.

    Args:
        folder: the checkpoint's folder. An existing checkpoint is replaced once the new one is
            complete; the first time that is logged as a warning.
        tree: arrays (of this process, or handles to the workers'), NumPy arrays, numbers and typed
            random keys.

    Raises:
        TypeError: a leaf is none of these, or two leaves have the same path.
        FileExistsError: the folder holds something else than a checkpoint.
        OSError: it cannot be written; what was there stays.
        WorkerError: a worker failed.

    Example:
        >>> launcher.save("checkpoint", {"weights": jnp.ones(3)})
    """
    final = Path(folder).expanduser().absolute()
    paths, leaves = _named(tree)
    if os.path.lexists(final):
        if not _may_replace(final):
            what = "it holds something else than a checkpoint; name another folder"
            raise FileExistsError(errno.EEXIST, what, str(final))
        if any(final.iterdir()):
            warn_once(_log, f"launcher.save replaces the checkpoint in {final}")
    backend, token = current(), secrets.token_hex(4)
    if isinstance(backend, RayBackend):
        there = [i for i, leaf in enumerate(leaves) if isinstance(leaf, RemoteArray)]
        arrays = [leaves[i] for i in there]
        here = {i: _as_numpy(leaf) for i, leaf in enumerate(leaves) if i not in set(there)}
        problems = backend.lend(write_part, arrays, str(final), paths, there, here, token)
        problem = next(filter(None, problems), None)
    else:
        _check_alone("save")
        values = [_as_numpy(leaf) if isinstance(leaf, RemoteArray) else leaf for leaf in leaves]
        _, problem = write_part(values, str(final), paths, range(len(leaves)), {}, token)
    if problem is not None:
        raise checkpoint.SaveError(problem)


def restore(folder: str | os.PathLike[str], like: Any) -> Any:
    """Return the pytree that `save` has stored, in the structure and the places of `like`.

    Args:
        folder: the checkpoint's folder.
        like: a tree of the same structure, shapes and dtypes, which is left as it is: arrays, each
            restored to where it lies (of workers, on these), or `jax.ShapeDtypeStruct`s, restored
            to their sharding or, without one, to this process.

    Raises:
        RestoreError: there is no intact checkpoint, or its leaves differ from those of `like`.
        WorkerError: a worker failed.

    Example:
        >>> launcher.save("checkpoint", {"weights": jnp.ones(3)})
        >>> tree = launcher.restore("checkpoint", like={"weights": jnp.zeros(3)})
        >>> float(tree["weights"].sum())
        3.0
    """
    path = Path(folder).expanduser().absolute()
    paths, leaves = _named(like)
    _check_stored(path, paths, leaves)
    backend = current()
    there = [i for i, leaf in enumerate(leaves) if isinstance(leaf, RemoteArray)]
    here = [i for i in range(len(leaves)) if i not in set(there)]
    if there and isinstance(backend, RayBackend):
        handles = [leaves[i] for i in there]
        avals = [(leaf.shape, leaf.dtype) for leaf in handles]
        found = backend.lend_for(read_part, handles, avals, str(path), paths, there)
    else:
        _check_alone("restore")
        here, there, found = list(range(len(leaves))), [], []
    restored = dict(zip(there, found, strict=True))
    places = [leaves[i] for i in here]
    restored |= zip(here, read_part(places, str(path), paths, here)[0], strict=True)
    return jax.tree.unflatten(jax.tree.structure(like), [restored[i] for i in range(len(leaves))])


def write_part(
    arrays: Sequence[Any],
    final: str,
    paths: Sequence[_Path],
    there: Sequence[int],
    here: Mapping[int, np.ndarray],
    token: str,
) -> tuple[list[jax.Array], str | None]:
    """Write this process's part of a checkpoint; the first process completes it.

    Args:
        arrays: the arrays that processes share.
        final: the checkpoint's folder.
        paths: the path of each leaf.
        there: of each of `arrays`, the place in `paths`.
        here: other leaves, which the first process writes, by their place.
        token: a string that is new for every save and the same in all processes.

    Returns:
        No array, and why the disk refused it, if it did.
    """
    writers = checkpoint.Writers(jax.process_index(), jax.process_count(), token)
    owned = dict(zip(there, checkpoint.copy_to_host([_plain(x) for x in arrays]), strict=True))
    for place, value in here.items():
        part = checkpoint.copy_to_host(value)
        owned[place] = part if writers.index == 0 else dataclasses.replace(part, shards=())
    parts: dict[str, Any] = {}
    for place, path in enumerate(paths):
        _put(parts, path, owned[place])
    folder = Path(final)
    step = int(folder.name) if is_step(folder.name) else 0
    try:
        with _quiet():
            checkpoint.save_parts(folder, parts, step, {}, writers)
    except checkpoint.SaveError as error:
        return [], str(error)
    return [], None


def read_part(
    like: Sequence[Any], folder: str, paths: Sequence[_Path], places: Sequence[int]
) -> tuple[list[Any], None]:
    """Read leaves of a checkpoint to where others lie; the counterpart of `write_part`.

    Args:
        like: arrays or `jax.ShapeDtypeStruct`s.
        folder: the checkpoint's folder.
        paths: the path of each leaf of the checkpoint.
        places: of each of `like`, the place in `paths`.
    """
    wanted: dict[str, Any] = {}
    specs = dict(zip(places, map(_spec, like), strict=True))
    for place, path in enumerate(paths):
        _put(wanted, path, specs.get(place, checkpoint.PLACEHOLDER))
    with _quiet():
        read = checkpoint.restore_parts(Path(folder), wanted)
    values = [functools.reduce(operator.getitem, paths[place], read) for place in places]
    return [_as_like(value, one) for value, one in zip(values, like, strict=True)], None


# -- trees ------------------------------------------------------------------------------------


def _named(tree: Any) -> tuple[list[_Path], list[Any]]:
    """Return each leaf's path, as text, and the leaves.

    Raises:
        TypeError: two leaves would be stored under one name, or one cannot be stored.
    """
    flat = jax.tree_util.tree_leaves_with_path(tree)
    word = functools.partial(jax.tree_util.keystr, simple=True)
    paths = [tuple(word((key,)) for key in path) or (_ALONE,) for path, _ in flat]
    seen: set[str] = set()
    for path, (_, leaf) in zip(paths, flat, strict=True):
        _check_leaf(path, leaf)
        if (name := ".".join(path)) in seen:
            raise TypeError(f"two leaves of the tree are named {name}; rename one")
        seen.add(name)
    return paths, [leaf for _, leaf in flat]


def _put(parts: dict[str, Any], path: _Path, value: Any) -> None:
    for word in path[:-1]:
        parts = parts.setdefault(word, {})
    parts[path[-1]] = value


def _check_leaf(path: _Path, leaf: Any) -> None:
    if _is_key(leaf) or (hasattr(leaf, "shape") and np.dtype(leaf.dtype).kind not in "OSUMm"):
        return
    if not isinstance(leaf, bool | int | float | complex):
        raise TypeError(
            f"{'.'.join(path)} is {type(leaf).__name__}, and a checkpoint holds arrays and "
            "numbers; leave it out"
        )


def _check_stored(folder: Path, paths: Sequence[_Path], leaves: Sequence[Any]) -> None:
    """Check that an intact checkpoint with these leaves is there."""
    if not os.path.lexists(folder):
        raise RestoreError(f"{folder} does not exist")
    if not (folder / CHECKSUMS).exists() and not (folder / METADATA).exists():
        raise RestoreError(f"{folder} is not a checkpoint")
    if problem := checkpoint.damage(folder):
        raise RestoreError(f"{folder} is damaged: {problem}")
    try:
        stored = checkpoint.stored_shapes(folder)
    except checkpoint.Mismatch as error:
        raise RestoreError(f"{folder}: {error}") from None
    wanted = {".".join(path): _spec(leaf) for path, leaf in zip(paths, leaves, strict=True)}
    for names, text in (
        (wanted.keys() - stored.keys(), "has no {}, which `like` has"),
        (stored.keys() - wanted.keys(), "has {}, which `like` does not have"),
    ):
        if names:
            raise RestoreError(f"{folder} {text.format(checkpoint.first_of(sorted(names)))}")
    for name, leaf in wanted.items():
        there, asked = _text(stored[name]), _text(leaf)
        if there != asked:
            raise RestoreError(
                f"{folder} does not fit: {name} is {there} there and {asked} in like"
            )


def _text(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"


# -- leaves -----------------------------------------------------------------------------------


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(getattr(leaf, "dtype", np.int32), jax.dtypes.prng_key))


def _plain(leaf: Any) -> Any:
    """Return a leaf, or the data of typed random keys, as it is stored."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as_numpy(leaf: Any) -> np.ndarray:
    if isinstance(leaf, RemoteArray):
        leaf = leaf.value
    return np.asarray(_plain(leaf))


def _spec(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return a leaf's shape and type as it is stored, and where it lies."""
    if isinstance(leaf, StackedArray):
        rows: jax.ShapeDtypeStruct = spec_at(leaf, leaf.where)
        return rows
    sharding = getattr(leaf, "sharding", None) if not isinstance(leaf, RemoteArray) else None
    if _is_key(leaf):
        keys = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        data = jax.eval_shape(jax.random.key_data, keys)
        if sharding is not None and isinstance(leaf, jax.Array) and leaf.addressable_shards:
            sharding = jax.random.key_data(leaf).sharding
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    spec: jax.ShapeDtypeStruct = spec_at(leaf, sharding)
    return spec


def _as_like(value: Any, like: Any) -> Any:
    """Return a leaf that was read in the form of `like`."""
    if _is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(like))
    if isinstance(like, bool | int | float | complex):
        return type(like)(value.item())
    return value


# -- the rest ---------------------------------------------------------------------------------


def _may_replace(folder: Path) -> bool:
    return folder.is_dir() and ((folder / CHECKSUMS).exists() or not any(folder.iterdir()))


def _check_alone(what: str) -> None:
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"launcher.{what} knows the workers of launcher.init, and this process is one of "
            "several of jax.distributed; use Orbax there"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back warnings of Orbax's that do not matter here."""
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        yield
    finally:
        absl.setLevel(level)
