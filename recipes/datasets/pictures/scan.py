"""Find pictures and their classes: in folders, lists, tar files and `.npz` files."""

from __future__ import annotations

import csv
import glob
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launcher.arrays.npz import read_arrays, read_headers
from launcher.base import DamagedError, missing_path
from launcher.recipes import InputError

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"}
_CLASS = "cls"  # the ending of a member that holds a class
_LIST = ".csv"


@dataclass(frozen=True)
class FoundPicture:
    """One picture, or why there is none.

    Attributes:
        file: the file that it is in, or is.
        name: what it is called there; "" where the file is the picture.
        label: its class; None: it has none.
        start: where it begins in the file: a byte, or of `.npz` files a row.
        size: its bytes; 0 in `.npz` files.
        why: what is wrong with it.
    """

    file: str
    name: str
    label: str | None
    start: int = 0
    size: int = 0
    why: str = ""

    @property
    def place(self) -> str:
        """The file and the position in it, in words."""
        return f"{self.file}, {self.name}" if self.name else self.file


def source_files(path: str, format: str, key: str = "dataset.path") -> list[Path]:
    """Return the files or folders that `path` names, by name.

    Raises:
        InputError: there are none.
    """
    root, suffix = Path(path).expanduser(), f".{format}"
    if not root.exists() and not glob.has_magic(path):
        raise InputError(
            f"{key}={path} {missing_path(root)}; name a file, a folder or a glob, or say "
            "dataset.format"
        )
    if format == "folder":
        if not root.is_dir() and not (root.is_file() and root.suffix == _LIST):
            raise InputError(
                f"{key}={path} is neither a folder of pictures nor a list of them ({_LIST}); "
                "name one, or say dataset.format"
            )
        return [root]
    if root.is_dir():
        found = sorted(p for p in root.iterdir() if p.suffix == suffix and p.is_file())
    elif glob.has_magic(path):
        found = sorted(Path(p) for p in glob.glob(str(root), recursive=True) if Path(p).is_file())
    else:
        found = [root] if root.is_file() else []
    if not found:
        raise InputError(f"{key}={path} names no file *{suffix}; name a file, a folder or a glob")
    return found


def scanned(file: Path, format: str) -> Iterator[FoundPicture]:
    """Yield the pictures of a file or folder of `source_files`, bad ones too, in order.

    Raises:
        OSError: it cannot be read.
    """
    if format == "tar":
        yield from _tar(file)
    elif format == "npz":
        yield from _npz(file)
    else:
        yield from _list(file) if file.is_file() else _folder(file)


def _folder(root: Path) -> Iterator[FoundPicture]:
    """Yield the pictures of each class's folder; those without one, where there are no folders."""
    folders = sorted(p for p in root.iterdir() if p.is_dir() and p.name[0] != ".")
    for folder in folders or [root]:
        with os.scandir(folder) as entries:
            files = sorted(e.name for e in entries if Path(e.name).suffix.lower() in SUFFIXES)
        for name in files:
            yield _file(folder / name, folder.name if folders else None)


def _list(path: Path) -> Iterator[FoundPicture]:
    """Yield what a list names, `file_name` and `label` (as Hugging Face's metadata.csv)."""
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        rows = csv.DictReader(file)
        try:
            for row in rows:
                name, label = row.get("file_name"), row.get("label")
                if name:
                    found = _file(path.parent / name, label or None)
                    yield found if not found.why else _bad_line(path, rows.line_num, found)
                else:
                    missing = FoundPicture("", "", None, why="it names no file (column file_name)")
                    yield _bad_line(path, rows.line_num, missing)
        except csv.Error as error:
            yield _bad_line(path, rows.line_num, FoundPicture("", "", None, why=str(error)))


def _bad_line(path: Path, line: int, found: FoundPicture) -> FoundPicture:
    why = f"{found.file}: {found.why}" if found.file else found.why
    return FoundPicture(str(path), f"line {line}", None, why=why)


def _file(path: Path, label: str | None) -> FoundPicture:
    try:
        size = path.stat().st_size
    except OSError as error:
        return FoundPicture(str(path), "", label, why=(error.strerror or "unreadable").lower())
    except ValueError as error:  # no file has such a name
        return FoundPicture(str(path), "", label, why=str(error))
    return FoundPicture(str(path), "", label, size=size, why="" if size else "it is empty")


def _tar(path: Path) -> Iterator[FoundPicture]:
    """Yield a picture for each sample: members of one name that differ after its first dot."""
    whole, sample = path.stat().st_size, _Sample(str(path))
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if not (member.isfile() or member.islnk() or member.issym()):
                    continue
                folder, _, base = member.name.rpartition("/")
                key, _, ending = base.partition(".")
                if (key := f"{folder}/{key}") != sample.key:
                    yield from sample.found()
                    sample = _Sample(str(path), key, folder.rpartition("/")[2])
                start, stop = member.offset_data, member.offset_data + member.size
                if not member.isfile():
                    sample.why, sample.name = "it is a link, which is not followed", member.name
                elif stop > whole:
                    sample.why = f"it is cut short: {whole:,} bytes of {stop:,} are there"
                    sample.name = member.name
                elif ending.lower() == _CLASS:
                    with open(path, "rb") as file:
                        file.seek(start)
                        sample.label = file.read(member.size).decode(errors="replace").strip()
                elif f".{ending.lower().rpartition('.')[2]}" in SUFFIXES:
                    sample.name, sample.start, sample.size = member.name, start, member.size
            yield from sample.found()
    except tarfile.TarError as error:
        yield from sample.found()
        yield FoundPicture(
            str(path), "", None, why=f"it is not a whole, uncompressed tar file ({error})"
        )


class _Sample:
    """What is known so far of one sample of a tar file."""

    def __init__(self, path: str, key: str = "", folder: str = "") -> None:
        self.path, self.key, self.name = path, key, ""
        self.label: str | None = folder if folder not in ("", ".") else None
        self.start = self.size = 0
        self.why = ""

    def found(self) -> Iterator[FoundPicture]:
        """Yield its picture, or that it has none."""
        if not self.key:
            return
        why = self.why or ("" if self.name else "it has no picture")
        why = why or ("" if self.size else "it is empty")
        name = self.name or self.key.removeprefix("/")
        yield FoundPicture(self.path, name, self.label, self.start, self.size, why)


def _npz(path: Path) -> Iterator[FoundPicture]:
    try:
        headers = read_headers(path)
        if "image" not in headers:
            raise DamagedError(f"it has no array 'image', it has {', '.join(headers) or 'none'}")
        shape, dtype = headers["image"]
        if len(shape) not in (3, 4) or dtype != np.uint8:
            raise DamagedError(
                f"'image' is {dtype} {list(shape)}, and pictures are uint8 "
                "[rows, height, width, channels]"
            )
        labels = read_arrays(path, ["label"])["label"] if "label" in headers else None
        if labels is not None and (labels.shape != shape[:1] or labels.dtype.kind not in "iu"):
            raise DamagedError(
                f"'label' is {labels.dtype} {list(labels.shape)}, and classes are an integer "
                f"for each of {shape[0]} rows"
            )
    except DamagedError as error:
        yield FoundPicture(str(path), "", None, why=str(error))
        return
    for row in range(shape[0]):
        label = None if labels is None else str(labels[row])
        why = f"its class is {label}" if label and label.startswith("-") else ""
        yield FoundPicture(str(path), f"row {row}", label, start=row, why=why)
