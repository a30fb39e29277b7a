"""Choose the files, and the bytes of them, that a text dataset reads.

Everything here works on names and sizes; no file is opened.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.base import missing_path
from launcher.recipes.protocols import InputError

# Folders of the standard library that are not its source, or are its tests.
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True, order=True)
class FileSlice:
    """A part of one file.

    Attributes:
        name: the file's path below the dataset's folder.
        path: where the file is.
        start: the first byte.
        stop: the byte after the last.
    """

    name: str
    path: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.stop - self.start


def named_files(
    named: str, path: str, in_folder: Callable[[Path], Iterable[Path]], remedy: str
) -> list[Path]:
    """Return the files that a path names, by name: one file, or those of a folder or a glob.

    Args:
        named: what the user wrote, as `dataset.path=…`.
        path: the path.
        in_folder: returns those of a folder, and maybe what is no file.
        remedy: what to name instead, where there is nothing.

    Raises:
        InputError: there is no such file or folder.
    """
    root = Path(path).expanduser()
    paths: Iterable[Path] = [root]
    if root.is_dir():
        paths = in_folder(root)
    elif glob.has_magic(path) and not root.is_file():
        paths = map(Path, glob.glob(str(root), recursive=True))
    elif not root.exists():
        raise InputError(f"{named} {missing_path(root)}; {remedy}")
    return sorted(path for path in paths if path.is_file())


def total_size(pieces: Sequence[FileSlice]) -> int:
    """Return the number of bytes in all of `pieces`."""
    return sum(piece.size for piece in pieces)


def stdlib_folder() -> Path:
    """Return the folder of this interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def find_stdlib() -> list[FileSlice]:
    """Return the standard library's readable, non-empty *.py files, without its tests, by name.

    Raises:
        InputError: there are none.
    """
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
    """Return the file `path`, or the non-empty files below that folder, by name.

    Args:
        path: a file or a folder.
        pattern: a glob that the files of a folder fit.

    Raises:
        InputError: there is none, or one may not be read.
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
            f"dataset.path={path} {missing_path(root)}; name a text file, "
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
    """Split files into training and validation.

    Files are taken in the order of a hash of their names, each into validation if it still fits
    into `fraction` of all bytes. Where that holds fewer than `minimum` bytes, the smallest file of
    at least `minimum` bytes is taken instead. A single file gives its last `fraction`. Validation
    is empty where `fraction` is 0 or it would hold fewer than `minimum` bytes.

    Args:
        pieces: whole files; their order makes no difference.
        fraction: the share of all bytes to hold out.
        minimum: the fewest bytes that are worth holding out.

    Returns:
        The parts of files to train on and those held out, each sorted by name.
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
        return [replace(piece, stop=middle)], [replace(piece, start=middle)]

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


_SAMPLES = 16
_SAMPLE = 2**14  # bytes


def fingerprint_of(paths: Iterable[Path]) -> str:
    """Return a digest of files, in their order: of their sizes, and of 16 samples of each.

    A file of up to 256 KiB is read whole; of a larger one its beginning, its end and places between
    them. It detects another corpus or file, but hardly a single changed byte.
    """
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{size}\n".encode())
            starts = list(range(0, size, _SAMPLE))
            if len(starts) > _SAMPLES:
                starts = [i * (size - _SAMPLE) // (_SAMPLES - 1) for i in range(_SAMPLES)]
            for start in starts:
                digest.update(os.pread(file.fileno(), _SAMPLE, start))
    return digest.hexdigest()[:32]
