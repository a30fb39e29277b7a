"""The files that documents come from, and the pieces that they are cut into to be read apart.

A piece is a range of bytes or of row groups.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from launcher.base import lacking, missing_path
from launcher.recipes import InputError
from launcher.recipes.data.corpus.saved_datasets import saved_files

PIECE = 2**24  # bytes of source that are read as one
SUFFIXES = {
    "text": (".txt",),
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}


class SourcePiece(NamedTuple):
    """A part of one file.

    Attributes:
        path: the file.
        start: the first byte, or row group.
        stop: the byte, or row group, behind the last.
        size: its bytes, about.
    """

    path: str
    start: int
    stop: int
    size: int


def find_sources(path: str, pattern: str | None, format: str) -> list[Path]:
    """Return the source files: one file, those that a glob fits, or those below a folder, by name.

    Args:
        path: what `dataset.path` names.
        pattern: which files of a folder; None: those with an ending of the format.
        format: text, jsonl, parquet or arrow.

    Raises:
        InputError: there are none.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    if root.is_dir() and format == "arrow" and pattern is None:
        paths = saved_files(root, f"dataset.path={path}")
    elif root.is_dir():
        endings = SUFFIXES[format]
        found = root.glob(pattern) if pattern else root.rglob("*")
        paths = [p for p in found if p.is_file() and (pattern or p.suffix in endings)]
    elif glob.has_magic(path):
        paths = [Path(p) for p in glob.glob(str(root), recursive=True) if Path(p).is_file()]
    else:
        raise InputError(
            f"dataset.path={path} {missing_path(root)}; name a file, a folder or a glob"
        )
    if not paths:
        wanted = pattern or " or ".join(f"*{ending}" for ending in SUFFIXES[format])
        raise InputError(f"dataset.path={path} holds no file that fits {wanted}; name another")
    return sorted(paths)


def pieces_of(paths: list[Path], format: str, size: int = PIECE) -> list[list[SourcePiece]]:
    """Return groups of pieces of about `size` bytes, in the order of the files."""
    groups: list[list[SourcePiece]] = [[]]
    for path in paths:
        for piece in _cut(path, format, size):
            if groups[-1] and sum(one.size for one in groups[-1]) + piece.size > size:
                groups.append([])
            groups[-1].append(piece)
    return groups


def _cut(path: Path, format: str, size: int) -> Iterator[SourcePiece]:
    whole = path.stat().st_size
    if format == "jsonl":
        for start in range(0, max(whole, 1), size):
            stop = min(start + size, whole)
            yield SourcePiece(str(path), start, stop, stop - start)
        return
    count = 1
    if format == "parquet":
        try:
            count = arrow_module("pyarrow.parquet").ParquetFile(path).num_row_groups
        except (OSError, ValueError):
            count = 0  # damaged: said when it is read
    if count <= 1:
        yield SourcePiece(str(path), 0, -1, whole)
        return
    for group in range(count):
        yield SourcePiece(str(path), group, group + 1, whole // count)


def stamp_of(path: str | Path) -> str:
    """Return a stamp of a file that changes with it: its name, size and time."""
    status = os.stat(path)
    return f"{Path(path).name} {status.st_size} {status.st_mtime_ns}"


def arrow_module(module: str) -> Any:
    """Import a module of pyarrow; raises InputError where that is not installed."""
    if command := lacking("pyarrow"):
        raise InputError(f"dataset=parquet and dataset=arrow need the package pyarrow; {command}")
    return import_module(module)
