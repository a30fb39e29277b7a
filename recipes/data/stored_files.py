"""Files in an object store: which there are, and ranges of them by a cache on the disk.

They are listed once, as a run starts: the names, sizes and versions are then a setting of the run,
`dataset.objects`, by which its processes and whatever resumes it see the same files. Each range is
asked for of that version, so a file that changes is an error, and never a mixture.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import io
import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, TypeVar

import numpy as np

from launcher.base import fits_glob, stores
from launcher.base.measurements import cache_folder
from launcher.recipes.data.block_cache import BlockCache
from launcher.recipes.data.file_access import OPEN_FILES, FileAccess
from launcher.recipes.data.files import Fits, NamedFiles, files_below, without_splits
from launcher.recipes.protocols import InputError

T = TypeVar("T")
R = TypeVar("R")
BLOCK = 2**18  # bytes that are asked for, and kept, as one
_AT_ONCE = 16  # requests
_LOCKS = 1024
_NAME = "name an object, a folder of some, or a glob"
_MOST_OBJECTS = 50_000  # a run's config.yaml lists them
_CHECK_SECONDS = 30.0  # in which a request is repeated before the run starts
_REMEDIES = {
    stores.MissingCredentialsError: "give some, or copy the files and name the copy",
    stores.ExpiredError: "renew them",
    stores.NotFoundError: _NAME,
}
_Objects = dict[Any, stores.Stat]  # by their paths
_store = functools.cache(stores.Store)  # by the URL of its bucket


class StoredPath(PurePosixPath):
    """The URL of an object, or of what several begin with, as a path."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    @property
    def bucket(self) -> str:
        """The URL of its bucket."""
        return "://".join((self.parts[0].rstrip(":"), self.parts[1]))

    @property
    def key(self) -> str:
        """The object's name in the bucket."""
        return "/".join(self.parts[2:])


def access_to(path: str, options: Any) -> FileAccess:
    """Return what reads the files that a path names.

    Args:
        path: a path on the disk, or a URL of an object store.
        options: the settings of a path in an object store, a `TokenRows`.

    Raises:
        InputError: the objects, which the settings do not list, cannot be listed.
    """
    if not stores.is_stored(path):
        return FileAccess()
    lines = options.objects
    if lines is None:
        lines = pinned({"dataset.path": path}, options.reads, None)
    return _access(tuple(lines), cache_folder(), int(options.cache_gib * 2**30))


@functools.lru_cache(1)  # a corpus may have very many
def _access(lines: tuple[str, ...], folder: Path, most: int) -> FileAccess:
    return _StoredFiles(dict(map(_parsed, lines)), BlockCache(folder / "objects", most))


class _StoredFiles(FileAccess):
    """Finds and reads objects, blocks of them by a cache."""

    def __init__(self, objects: _Objects, cache: BlockCache) -> None:
        super().__init__()
        self._objects, self._cache = objects, cache
        self._turns = [threading.Lock() for _ in range(_LOCKS)]
        self.array = functools.lru_cache(OPEN_FILES)(
            lambda path: np.frombuffer(self.whole(path), np.int64)
        )

    def root(self, path: str) -> Any:
        return StoredPath(path)

    def named(
        self, named: str, path: str, fits: Fits, remedy: str, splits: str = "refused"
    ) -> NamedFiles:
        root, listed = self.root(path), list[Any](self._objects)
        if root in self._objects:
            return NamedFiles([root], {}, {})
        if glob.has_magic(path):
            fit = [one for one in listed if fits_glob(str(one), str(root))]
            return NamedFiles(sorted(fit), {}, {})
        return without_splits(named, root, files_below(root, listed, fits), splits)

    def fitting(self, root: Path, pattern: str) -> Fits:
        return lambda path: fits_glob(path.relative_to(root).as_posix(), pattern)

    def check_readable(self, named: str, path: Path) -> None:
        pass  # said where it is read

    def size(self, path: PurePath) -> int | None:
        found = self._objects.get(path)
        return None if found is None else found.size

    def read(self, path: PurePath, start: int, size: int) -> bytes:
        stop = min(start + size, self._objects[path].size)
        if stop <= start:
            return b""
        first = start // BLOCK
        blocks = b"".join(self._block(path, n) for n in range(first, -(-stop // BLOCK)))
        return blocks[start - first * BLOCK : stop - first * BLOCK]

    def opened(self, path: PurePath) -> Any:
        return _StoredFile(path, self._objects[path])

    def stamp(self, path: PurePath) -> str:
        size, version, _ = self._objects[path]
        return f"{path} {size} {version}"

    def modified(self, path: PurePath) -> float:
        return self._objects[path].modified

    def fingerprint(self, paths: Sequence[PurePath]) -> str:
        return hashlib.sha256("\n".join(map(self.stamp, paths)).encode()).hexdigest()[:32]

    def each(self, function: Callable[[T], R], given: Iterable[T]) -> Iterator[R]:
        with ThreadPoolExecutor(_AT_ONCE, "stored-files") as pool:
            yield from pool.map(function, given)

    def _block(self, path: PurePath, number: int) -> bytes:
        stat = self._objects[path]
        start, stop = number * BLOCK, min((number + 1) * BLOCK, stat.size)
        name = hashlib.sha256(f"{self.stamp(path)} {start} {stop}".encode()).hexdigest()[:40]
        with self._turns[number % _LOCKS]:  # rows that share a block ask for it once
            block = self._cache.get(name)
            if block is None or len(block) != stop - start:
                block = _range(path, stat, start, stop)
                self._cache.put(name, block)
        return block


class _StoredFile(io.RawIOBase):
    """An object as a file to read, for libraries."""

    def __init__(self, path: Any, stat: stores.Stat) -> None:
        self._path, self._stat, self._at = path, stat, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._stat.size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = max(self._at, min(self._at + len(buffer), self._stat.size))
        content = _range(self._path, self._stat, self._at, stop)
        buffer[: len(content)] = content
        self._at = stop
        return len(content)


def _range(path: Any, stat: stores.Stat, start: int, stop: int) -> bytes:
    """Return bytes of an object, of this very version; raises InputError."""
    try:
        return _store(path.bucket).get(path.key, start, stop, stat.version)
    except (stores.ChangedError, stores.NotFoundError):
        raise InputError(
            f"{path} has changed or gone since the run began, with {stat.size:,} bytes and the "
            f"version {stat.version}; put it back, or begin another run"
        ) from None
    except stores.StoreError as error:
        raise InputError(_with_remedy(error)) from None


def pinned(
    paths: Mapping[str, str], reads: tuple[str, ...], before: Sequence[str] | None
) -> list[str]:
    """Return the objects that URLs name, each as a line of its URL, size, version and time.

    Args:
        paths: the URLs, by the settings that name them.
        reads: how the names of files end that are read, in small letters; empty: as they like.
        before: what a run found that is resumed: it sees no others, and these as they were.

    Raises:
        InputError: they cannot be listed, or one of `before` has changed.
    """
    known = dict(map(_parsed, before or ()))
    now: _Objects = {}
    for key, path in paths.items():
        now |= _listed(path, reads, f"{key}={path}")
    if len(now) > _MOST_OBJECTS:
        raise InputError(
            f"{', '.join(f'{key}={path}' for key, path in paths.items())} names {len(now):,} "
            f"objects, and a run reads {_MOST_OBJECTS:,} at most; join them into larger ones"
        )
    for url, stat in known.items():
        new = now.get(url)
        if new is None or new[:2] != stat[:2]:
            what = "is gone" if new is None else f"now holds {new.size:,}, version {new.version}"
            raise InputError(
                f"{url} has changed since the run began: it held {stat.size:,} bytes, version "
                f"{stat.version}; it {what}; put it back to resume the run, or choose another "
                "run.id"
            )
    return [_line(*one) for one in (sorted(now.items()) if before is None else known.items())]


def _with_remedy(error: stores.StoreError) -> str:
    """Return a store's error with what to do."""
    remedy = _REMEDIES.get(type(error), "see that the store can be reached and read from here")
    return str(error) if "pip install" in str(error) else f"{error}; {remedy}"


def _line(path: PurePath, stat: stores.Stat) -> str:
    return f"{path} {stat.size} {stat.version} {stat.modified:.0f}"


def _parsed(line: str) -> tuple[PurePath, stores.Stat]:
    try:
        url, size, version, modified = line.rsplit(" ", 3)
        return StoredPath(url), stores.Stat(int(size), version, float(modified))
    except ValueError:
        raise InputError(f"dataset.objects: {line!r} is no line of a run; leave it out") from None


def _listed(path: str, reads: tuple[str, ...], named: str) -> _Objects:
    """Return the object that a URL names and those that say what it is, or those below it."""
    root = StoredPath(path)
    if not re.fullmatch(r"\w+://[\w.-]+(/.*)?", path):
        raise InputError(f"{named} names no bucket; write s3://bucket/folder, or gs://")
    try:
        store = stores.Store(root.bucket, _CHECK_SECONDS)
        is_one = root.key and not glob.has_magic(path)
        found = dict(_beside(store, root, reads)) if is_one else {}
        found = found or dict(_below(store, root))
    except stores.StoreError as error:
        raise InputError(f"{named}: {_with_remedy(error)}") from None
    if not found:
        raise InputError(f"{named} names no object; {_NAME}")
    wanted = {one: stat for one, stat in found.items() if str(one).lower().endswith(reads)}
    return (reads and wanted) or found  # an error will name what there is instead


def _beside(
    store: stores.Store, root: StoredPath, reads: tuple[str, ...]
) -> Iterator[tuple[PurePath, stores.Stat]]:
    with suppress(stores.NotFoundError):
        yield root, store.stat(root.key)
        named = (root.with_suffix(e) if e[0] == "." else root.parent / e for e in reads)
        for path in (path for path in named if path != root):
            # For one who may not list, what is not there is forbidden.
            with suppress(stores.NotFoundError, stores.ForbiddenError):
                yield path, store.stat(path.key)


def _below(store: stores.Store, root: StoredPath) -> Iterator[tuple[PurePath, stores.Stat]]:
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), root.parts[2:])
    for key, stat in store.objects("".join(f"{part}/" for part in fixed)):
        path = StoredPath(f"{root.bucket}/{key}")
        if path.key == key:  # others are no files: they end in a /, say
            yield path, stat
