"""Which files, and which bytes of them, a text dataset reads. Only `recipes.text` imports it.

Everything here works on names and sizes; no file is opened.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from recipes import InputError

# Folders of the standard library that are not its source, or are its tests.
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class FileSlice(NamedTuple):
    """Bytes `start` to `stop` of one file. `name` is its path below the dataset's folder."""

    name: str
    path: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def total_size(pieces: Sequence[FileSlice]) -> int:
    """Bytes in all of `pieces`."""
    return sum(piece.size for piece in pieces)


def stdlib_folder() -> Path:
    """Where this interpreter keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def find_stdlib() -> list[FileSlice]:
    """The standard library's readable, non-empty *.py files, without its tests, by name."""
    root = stdlib_folder()
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    pieces = _whole([path for path in paths if os.access(path, os.R_OK)], root)
    if not pieces:
        raise InputError(
            f"dataset=stdlib_text finds no source files in {root}; "
            "choose dataset=text and give your own with dataset.path"
        )
    return pieces


def find_text(path: str, pattern: str) -> list[FileSlice]:
    """The file `path`, or the non-empty files below the folder `path` that fit `pattern`, by name.

    Raises `InputError` where there is none, or one that may not be read.
    """
    root = Path(path).expanduser()
    if root.is_file():
        paths, base = [root], root.parent
    elif root.is_dir():
        paths, base = _matching(root, pattern), root
    elif root.exists():
        raise InputError(f"dataset.path={path} is neither a file nor a folder; name one of these")
    else:
        raise InputError(
            f"dataset.path={path} does not exist; name a text file, "
            "or a folder whose files fit dataset.pattern"
        )
    for candidate in paths:
        if not os.access(candidate, os.R_OK):
            raise InputError(
                f"dataset.path={path}: you may not read {candidate}; "
                "change its permissions or name another path"
            )
    pieces = _whole(paths, base)
    if not pieces:
        what = "is empty" if base != root else f"holds only empty files for {pattern}"
        raise InputError(f"dataset.path={path} {what}; name a file or folder with text in it")
    return pieces


def split(
    pieces: Sequence[FileSlice], fraction: float, minimum: int
) -> tuple[list[FileSlice], list[FileSlice]]:
    """Parts `pieces`, whole files, into (training, validation) by file.

    Files are taken in the order of a hash of their names, each into validation if it still fits
    into `fraction` of all bytes. Where that holds fewer than `minimum` bytes, the smallest file of
    at least `minimum` bytes is taken instead. A single file gives its last `fraction`. Validation
    comes out empty where `fraction` is 0 or it would hold fewer than `minimum` bytes. The outcome
    depends on the set of files, not on their order; both lists are sorted by name.
    """
    pieces = sorted(pieces)
    total = total_size(pieces)
    budget = int(fraction * total)
    if budget == 0:
        return pieces, []
    if len(pieces) == 1:
        if budget < minimum:
            return pieces, []
        (piece,) = pieces
        middle = piece.stop - budget
        return [piece._replace(stop=middle)], [piece._replace(start=middle)]

    ranked = sorted(pieces, key=lambda piece: hashlib.sha256(os.fsencode(piece.name)).digest())
    held_out: set[FileSlice] = set()
    room = budget
    for piece in ranked:
        if piece.size <= room:
            held_out.add(piece)
            room -= piece.size
    if budget - room < minimum:
        enough = [p for p in ranked if minimum <= p.size <= total - minimum]
        held_out = {min(enough, key=lambda piece: piece.size)} if enough else set()
    return [p for p in pieces if p not in held_out], [p for p in pieces if p in held_out]


def _matching(root: Path, pattern: str) -> list[Path]:
    try:
        paths = [path for path in root.glob(pattern) if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise InputError(
            f"dataset.pattern={pattern} is not a pattern for files below a folder ({error}); "
            "use one like **/*.txt"
        ) from None
    if not paths:
        raise InputError(
            f"dataset.pattern={pattern} fits no file below dataset.path={root}; "
            "change either, for example dataset.pattern='**/*'"
        )
    return paths


def _whole(paths: Sequence[Path], root: Path) -> list[FileSlice]:
    pieces = [
        FileSlice(path.relative_to(root).as_posix(), path, 0, path.stat().st_size) for path in paths
    ]
    return sorted(piece for piece in pieces if piece.size)
