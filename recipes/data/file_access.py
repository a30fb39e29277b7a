"""Finding and reading the files of a dataset, which a subclass does in another place."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np

from launcher.recipes.data.files import Fits, NamedFiles, fingerprint_of, fitting, named_files
from launcher.recipes.protocols import InputError

T = TypeVar("T")
R = TypeVar("R")
OPEN_FILES = 64


class _Opened:
    """An open file, closed when nobody reads from it any more."""

    def __init__(self, path: PurePath) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "descriptor"):
            close(self.descriptor)  # as a process ends, `os` may be gone


def _mapped(path: PurePath) -> np.ndarray:
    return np.memmap(path, np.int64, "r")


class FileAccess:
    """Finds and reads files on the disk, by their paths; a subclass does so elsewhere.

    Attributes:
        array: returns the numbers that a file holds, int64; a file on the disk is mapped.
    """

    def __init__(self) -> None:
        self._open = functools.lru_cache(OPEN_FILES)(_Opened)
        self.array: Callable[[PurePath], np.ndarray] = functools.lru_cache(OPEN_FILES)(_mapped)

    def root(self, path: str) -> Path:
        """Return the path that a setting names."""
        return Path(path).expanduser()

    def named(
        self, named: str, path: str, fits: Fits, remedy: str, splits: str = "refused"
    ) -> NamedFiles:
        """Return the files that a path names, as `named_files` does."""
        return named_files(named, path, fits, remedy, splits)

    def fitting(self, root: Path, pattern: str) -> Fits:
        """Return whether files below a folder fit a pattern, as `fitting` does."""
        return fitting(root, pattern)

    def check_readable(self, named: str, path: Path) -> None:
        """Raise InputError if a file may not be read."""
        if not os.access(path, os.R_OK):
            raise InputError(f"{named}: you may not read {path}; change its permissions")

    def size(self, path: PurePath) -> int | None:
        """Return a file's bytes; None where there is none."""
        file = Path(path)
        return file.stat().st_size if file.is_file() else None

    def read(self, path: PurePath, start: int, size: int) -> bytes:
        """Return `size` bytes from `start` on, fewer where the file ends before."""
        return os.pread(self._open(path).descriptor, size, start)

    def whole(self, path: PurePath) -> bytes:
        """Return all bytes of a file."""
        return self.read(path, 0, self.size(path) or 0)

    def opened(self, path: PurePath) -> Any:
        """Return what a library opens: the path, or a file to read."""
        return path

    def stamp(self, path: PurePath) -> str:
        """Return a stamp of a file that changes with it: its name, size and time."""
        status = os.stat(path)
        return f"{path.name} {status.st_size} {status.st_mtime_ns}"

    def modified(self, path: PurePath) -> float:
        """Return the time of a file's last change, in seconds since 1970."""
        return os.stat(path).st_mtime

    def fingerprint(self, paths: Sequence[PurePath]) -> str:
        """Return a digest of files that tells others from them, as `fingerprint_of`."""
        return fingerprint_of(map(Path, paths))

    def each(self, function: Callable[[T], R], given: Iterable[T]) -> Iterator[R]:
        """Yield what a function that reads returns for each, in order."""
        return map(function, given)
