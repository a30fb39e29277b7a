"""The files that documents come from, and the pieces that they are cut into to be read apart.

A piece is a range of bytes or of row groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from launcher.base import DamagedError, fits_glob, hub, lacking, read_json
from launcher.recipes.data.file_access import FileAccess
from launcher.recipes.data.files import NamedFiles, local_path, with_ending
from launcher.recipes.protocols import InputError

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

    path: PurePath
    start: int
    stop: int
    size: int


def find_sources(path: str, pattern: str | None, format: str, access: FileAccess) -> NamedFiles:
    """Return the source files: one file, those that a glob fits, or those below a folder, by name.

    Of several splits it is `train`.

    Args:
        path: what `dataset.path` names.
        pattern: which files of a folder; None: those with an ending of the format.
        format: text, jsonl, parquet or arrow.
        access: how files are read.

    Raises:
        InputError: there are none.
    """
    named, endings = f"dataset.path={path}", SUFFIXES[format]
    path = local_path("dataset.path", path, wanted_files(pattern, format))
    root = access.root(path)
    fits = access.fitting(root, pattern) if pattern else with_ending(endings)
    found = access.named(named, path, fits, "name a file, a folder or a glob", _TRAIN)
    if format == "arrow" and not pattern and root.is_dir():
        listed, paths = set(saved_files(root, found, named)), found.paths
        left = {**found.left, "not listed": [path for path in paths if path not in listed]}
        found = NamedFiles([path for path in paths if path in listed], left, found.folders)
    if not found.paths:
        wanted = pattern or " or ".join(f"*{ending}" for ending in endings)
        remedy = "name another, or unpack what is packed"
        raise InputError(f"{named} holds no file that fits {wanted}{found.left_out}; {remedy}")
    return found


def wanted_files(pattern: str | None, format: str) -> hub.Fits:
    """Return which files of a folder fit, by their paths in it; see `find_sources`."""
    endings = (*SUFFIXES[format], *([".json"] if format == "arrow" else []))  # lists of its files
    if pattern is None:
        return lambda path: path.lower().endswith(endings)
    return lambda path: fits_glob(path, pattern)


def pieces_of(paths: list[Path], format: str, access: FileAccess) -> list[list[SourcePiece]]:
    """Return groups of pieces of about `PIECE` bytes, in the order of the files."""
    groups: list[list[SourcePiece]] = [[]]
    for path in paths:
        for piece in _cut(path, format, access):
            if groups[-1] and sum(one.size for one in groups[-1]) + piece.size > PIECE:
                groups.append([])
            groups[-1].append(piece)
    return groups


def _cut(path: Path, format: str, access: FileAccess) -> Iterator[SourcePiece]:
    whole = access.size(path) or 0
    if format == "jsonl":
        for start in range(0, max(whole, 1), PIECE):
            stop = min(start + PIECE, whole)
            yield SourcePiece(path, start, stop, stop - start)
        return
    count = 1
    if format == "parquet":
        try:
            file = arrow_module("pyarrow.parquet").ParquetFile(access.opened(path))
            count = file.num_row_groups
        except InputError:
            raise
        except (OSError, ValueError):
            count = 0  # damaged: said when it is read
    if count <= 1:
        yield SourcePiece(path, 0, -1, whole)
        return
    for group in range(count):
        yield SourcePiece(path, group, group + 1, whole // count)


def arrow_module(module: str) -> Any:
    """Import a module of pyarrow; raises InputError where that is not installed."""
    if command := lacking("pyarrow"):
        raise InputError(f"dataset=parquet and dataset=arrow need the package pyarrow; {command}")
    return import_module(module)


_STATE = "state.json"
_SPLITS = "dataset_dict.json"
_TRAIN = "train"
_AGAIN = "save the dataset again"


def saved_files(folder: Path, found: NamedFiles, source: str) -> list[Path]:
    """Return the Arrow files of the dataset that a folder holds.

    Those of a folder that `datasets` did not write are all below it.

    Args:
        folder: the folder.
        found: the Arrow files there and below, and the folders.
        source: what the user named, as `dataset.path=…`.

    Raises:
        InputError: what the folder says of itself cannot be read, or names what is not there.
    """
    split = _split_of(folder, source)
    if split is not None:
        folder = folder / split
        if not folder.is_dir():
            raise InputError(f"{source} names the split {split}, and lacks {folder}; {_AGAIN}")
    if (folder / _STATE).is_file():
        return _listed(folder, source)
    files = [path for path in found.paths if path.parent == folder]
    for below in (path for path in found.folders if path.parent == folder):
        files += saved_files(below, found, source)
    return files


def _split_of(folder: Path, source: str) -> str | None:
    if not (folder / _SPLITS).is_file():
        return None
    names = _names(folder / _SPLITS, source, lambda tree: tree["splits"])
    if _TRAIN not in names and len(names) != 1:
        raise InputError(
            f"{source} holds the splits {', '.join(names) or 'none'}, and none is {_TRAIN}; "
            "name the folder of the one to train on"
        )
    return _TRAIN if _TRAIN in names else str(names[0])


def _listed(folder: Path, source: str) -> list[Path]:
    """Return the files that `state.json` lists."""
    names = _names(
        folder / _STATE, source, lambda tree: [file["filename"] for file in tree["_data_files"]]
    )
    for path in (folder / name for name in names):
        if not path.is_file():
            raise InputError(f"{source}: {path} is missing, which {_STATE} lists; {_AGAIN}")
    return [folder / name for name in names]


def _names(file: Path, source: str, names_in: Any) -> list[str]:
    try:
        names = names_in(read_json(file))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DamagedError("it lists no names")
        return names
    except (DamagedError, LookupError, TypeError) as error:
        why = error if isinstance(error, DamagedError) else "it lists no names"
        raise InputError(f"{source}: {file} is damaged: {why}; {_AGAIN}") from None
