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
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, TypeVar, cast

from launcher.base import is_stored
from launcher.base import object_store as stores
from launcher.base.measurements import cache_folder
from launcher.recipes.data.block_cache import BlockCache
from launcher.recipes.data.file_access import FileAccess
from launcher.recipes.data.files import NamedFiles, files_below, without_splits
from launcher.recipes.protocols import InputError

T = TypeVar("T")
R = TypeVar("R")
BLOCK = 2**18  # bytes that are asked for, and kept, as one
_AT_ONCE = 16  # requests
_LOCKS = 1024
_NAME = "name an object, a folder of some, or a glob"
_TRIES = 4  # of a range that comes short
_CHECK_SECONDS = 30.0  # in which a request is repeated before the run starts


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
    if not is_stored(path):
        return FileAccess()
    lines = options.objects if options.objects is not None else _listed(path, options.reads)
    cache = BlockCache(cache_folder() / "objects", int(options.cache_gib * 2**30))
    return _StoredFiles({StoredPath(url): stat for url, stat in map(_parsed, lines)}, cache)


class _StoredFiles(FileAccess):
    """Finds and reads objects, blocks of them by a cache."""

    def __init__(self, objects: Mapping[StoredPath, stores.Stat], cache: BlockCache) -> None:
        self._objects, self._cache = objects, cache
        self._turns = [threading.Lock() for _ in range(_LOCKS)]

    def root(self, path: str) -> Path:
        return cast(Path, StoredPath(path))

    def named(
        self,
        named: str,
        path: str,
        fits: Callable[[Path], bool],
        remedy: str,
        splits: str = "refused",
    ) -> NamedFiles:
        root, all_paths = StoredPath(path), cast(list[Path], sorted(self._objects))
        if root in self._objects:
            return NamedFiles([cast(Path, root)], {}, {})
        if glob.has_magic(path):
            parts = root.parts
            return NamedFiles([one for one in all_paths if _fits(one.parts, parts)], {}, {})
        found = files_below(cast(Path, root), all_paths, fits)
        return without_splits(named, cast(Path, root), found, splits)

    def fitting(self, root: Path, pattern: str) -> Callable[[Path], bool]:
        parts = PurePosixPath(pattern).parts
        return lambda path: _fits(path.relative_to(root).parts, parts)

    def check_readable(self, named: str, path: Path) -> None:
        pass  # said where it is read

    def size(self, path: PurePath) -> int | None:
        found = self._objects.get(cast(StoredPath, path))
        return None if found is None else found.size

    def read(self, path: PurePath, start: int, size: int) -> bytes:
        path = cast(StoredPath, path)
        stop = min(start + size, self._objects[path].size)
        if stop <= start:
            return b""
        first = start // BLOCK
        blocks = b"".join(self._block(path, n) for n in range(first, -(-stop // BLOCK)))
        return blocks[start - first * BLOCK : stop - first * BLOCK]

    def opened(self, path: PurePath) -> Any:
        path = cast(StoredPath, path)
        return io.BufferedReader(_StoredFile(path, self._objects[path]), BLOCK)

    def stamp(self, path: PurePath) -> str:
        size, version, _ = self._objects[cast(StoredPath, path)]
        return f"{path} {size} {version}"

    def modified(self, path: PurePath) -> float:
        return self._objects[cast(StoredPath, path)].modified

    def fingerprint(self, paths: Sequence[PurePath]) -> str:
        return hashlib.sha256("\n".join(map(self.stamp, paths)).encode()).hexdigest()[:32]

    def each(self, function: Callable[[T], R], given: Iterable[T]) -> Iterator[R]:
        with ThreadPoolExecutor(_AT_ONCE, "stored-files") as pool:
            yield from pool.map(function, given)

    def _block(self, path: StoredPath, number: int) -> bytes:
        stat = self._objects[path]
        start = number * BLOCK
        stop = min(start + BLOCK, stat.size)
        name = hashlib.sha256(f"{path} {stat.version} {start} {stop}".encode()).hexdigest()[:40]
        with self._turns[number % _LOCKS]:  # rows that share a block ask for it once
            block = self._cache.get(name)
            if block is None or len(block) != stop - start:
                block = _range(path, stat, start, stop)
                self._cache.put(name, block)
        return block


class _StoredFile(io.RawIOBase):
    """An object as a file to read, for libraries."""

    def __init__(self, path: StoredPath, stat: stores.Stat) -> None:
        self._path, self._stat, self._at = path, stat, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._stat.size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._stat.size)
        if stop <= self._at:
            return 0
        content = _range(self._path, self._stat, self._at, stop)
        buffer[: len(content)] = content
        self._at = stop
        return len(content)


def _range(path: StoredPath, stat: stores.Stat, start: int, stop: int) -> bytes:
    """Return bytes of an object, of this very version; raises InputError."""
    try:
        for _ in range(_TRIES):
            content = _store(path.bucket).get(path.key, start, stop, stat.version)
            if len(content) == stop - start:
                return content
    except (stores.ChangedError, stores.NotFoundError):
        raise InputError(
            f"{path} has changed or gone since the run began, with {stat.size:,} bytes and the "
            f"version {stat.version}; put it back, or begin another run"
        ) from None
    except stores.StoreError as error:
        raise InputError(_with_remedy(error)) from None
    raise InputError(
        f"{path}: the store gives {len(content):,} bytes for bytes {start:,} to {stop:,}, again "
        "and again; look at what is between it and this machine"
    )


@functools.cache
def _store(bucket: str) -> stores.Store:
    return stores.Store(bucket)


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
    now: dict[str, str] = {}
    for key, path in paths.items():
        found = {line.rsplit(" ", 3)[0]: line for line in _listed(path, reads, f"{key}={path}")}
        if not found:
            raise InputError(f"{key}={path} names no object; {_NAME}")
        now |= found
    if before is None:
        urls = (url for url in sorted(now) if not reads or url.lower().endswith(reads))
        return [now[url] for url in urls]
    for line in before:
        url, stat = _parsed(line)
        new = _parsed(now[url])[1] if url in now else None
        if new is None or new[:2] != stat[:2]:
            what = "is gone" if new is None else f"now holds {new.size:,}, version {new.version}"
            raise InputError(
                f"{url} has changed since the run began: it held {stat.size:,} bytes, version "
                f"{stat.version}; it {what}; put it back to resume the run, or choose another "
                "run.id"
            )
    return list(before)


def _with_remedy(error: stores.StoreError) -> str:
    """Return a store's error with what to do."""
    remedy = "see that the store can be reached and read from here"
    if isinstance(error, stores.MissingCredentialsError):
        remedy = "give some, or copy the files and name the copy"
    elif isinstance(error, stores.NotFoundError):
        remedy = _NAME
    return str(error) if "pip install" in str(error) else f"{error}; {remedy}"


def _parsed(line: str) -> tuple[str, stores.Stat]:
    url, size, version, modified = line.rsplit(" ", 3)
    return url, stores.Stat(int(size), version, float(modified))


def _listed(path: str, reads: tuple[str, ...], named: str = "dataset.path") -> list[str]:
    """Return the object that a URL names and those that say what it is, or those below it."""
    root = StoredPath(path)
    if len(root.parts) < 2:
        raise InputError(f"{named} names no bucket; write s3://bucket/folder, or gs://")
    try:
        store = stores.Store(root.bucket, _CHECK_SECONDS)
        is_one = root.key and not glob.has_magic(path)
        one = list(_beside(store, root, reads)) if is_one else []
        return one or list(_below(store, root))
    except stores.StoreError as error:
        raise InputError(f"{named}: {_with_remedy(error)}") from None


def _beside(store: stores.Store, root: StoredPath, reads: tuple[str, ...]) -> Iterator[str]:
    with suppress(stores.NotFoundError):
        yield _line(root, store.stat(root.key))
        named = (root.with_suffix(e) if e[0] == "." else root.parent / e for e in reads)
        for path in (path for path in named if path != root):
            # For one who may not list, what is not there is forbidden.
            with suppress(stores.NotFoundError, stores.ForbiddenError):
                yield _line(path, store.stat(path.key))


def _below(store: stores.Store, root: StoredPath) -> Iterator[str]:
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), root.parts[2:])
    for key, stat in store.objects("".join(f"{part}/" for part in fixed)):
        path = StoredPath(f"{root.bucket}/{key}")
        if path.key == key:  # others are no files: they end in a /, say
            yield _line(path, stat)


def _line(path: StoredPath, stat: stores.Stat) -> str:
    return f"{path} {stat.size} {stat.version} {stat.modified:.0f}"


def _fits(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return whether the parts of a path fit those of a glob."""
    if not patterns or not parts:
        return not parts and all(pattern == "**" for pattern in patterns)
    first, *others = patterns
    if first == "**":
        is_shown = not parts[0].startswith(".")
        return _fits(parts, others) or (is_shown and _fits(parts[1:], patterns))
    is_shown = parts[0].startswith(".") == first.startswith(".")
    return is_shown and fnmatchcase(parts[0], first) and _fits(parts[1:], others)
