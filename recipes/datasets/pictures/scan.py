"""Find pictures and their classes: in folders, lists, tar files and `.npz` files."""

from __future__ import annotations

import csv
import itertools
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from launcher.arrays.npz import read_arrays, read_headers
from launcher.base import DamagedError
from launcher.recipes import InputError
from launcher.recipes.data.files import NamedFiles, is_hidden, named_files, with_ending

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


def source_files(path: str, format: str, key: str = "dataset.path") -> NamedFiles:
    """Return the files that `path` names, by name; of a folder of pictures these.

    Raises:
        InputError: there are none.
        OSError: a folder cannot be read.
    """
    root, is_folder = Path(path).expanduser(), format == "folder"
    fits = with_ending(SUFFIXES if is_folder else [f".{format}"])
    remedy = "name a file, a folder or a glob, or say dataset.format"
    splits = "folders" if is_folder else "refused"
    found = named_files(f"{key}={path}", path, fits, remedy, splits)
    if is_folder and not root.is_dir() and any(file.suffix != _LIST for file in found.paths):
        raise InputError(
            f"{key}={path} is neither a folder of pictures nor a list of them ({_LIST}); "
            "name one, or say dataset.format"
        )
    if not found.paths:
        what = "holds no picture" if is_folder else f"names no file *.{format}"
        raise InputError(f"{key}={path} {what}{found.left_out}; name a file, a folder or a glob")
    return found


def scanned(file: Path, format: str) -> Iterator[FoundPicture]:
    """Yield the pictures of a tar or `.npz` file or a list, bad ones too, in order.

    Raises:
        OSError: it cannot be read.
    """
    return {"tar": _tar, "npz": _npz, "folder": _list}[format](file)


def classed(root: Path, found: NamedFiles) -> tuple[list[FoundPicture], list[str]]:
    """Return the pictures below a folder, and the folders that would be classes but have none.

    The class is the first folder below the root, or below the only one there; a picture in the root
    itself has none.
    """
    below, depth = [path.relative_to(root).parts for path in found.paths], 0
    while len({parts[depth] for parts in below}) == 1 and any(len(p) > depth + 2 for p in below):
        depth += 1
    labels = [parts[depth] if len(parts) > depth + 1 else None for parts in below]
    folders = (folder.relative_to(root).parts for folder in found.folders)
    empty = {parts[depth] for parts in folders if len(parts) == depth + 1} - set(labels)
    return list(map(_file, found.paths, labels)), sorted(empty)


def _list(path: Path) -> Iterator[FoundPicture]:
    """Yield what a list names, `file_name` and `label` (as Hugging Face's metadata.csv)."""
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        rows = csv.DictReader(file)
        try:
            for row in rows:
                if not row.get("file_name"):
                    why = "it names no file (column file_name)"
                    yield _bad_line(path, rows.line_num, why)
                    continue
                found = _file(path.parent / row["file_name"], row.get("label") or None)
                why = f"{found.file}: {found.why}"
                yield _bad_line(path, rows.line_num, why) if found.why else found
        except csv.Error as error:
            yield _bad_line(path, rows.line_num, str(error))


def _bad_line(path: Path, line: int, why: str) -> FoundPicture:
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
    members, problem = [], ""
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                is_file = member.isfile() or member.islnk() or member.issym()
                if is_file and not any(map(is_hidden, Path(member.name).parts)):
                    members.append(member)
    except tarfile.TarError as error:  # what comes before the damage is known
        problem = f"it is not a whole, uncompressed tar file ({error})"
    for key, sample in itertools.groupby(members, _key):
        yield _sample(path, key, sample)
    if problem:
        yield FoundPicture(str(path), "", None, why=problem)


def _key(member: tarfile.TarInfo) -> str:
    folder, _, base = member.name.rpartition("/")
    return f"{folder}/{base.partition('.')[0]}"


def _sample(path: Path, key: str, members: Iterable[tarfile.TarInfo]) -> FoundPicture:
    """Return the picture of a sample's members, or why there is none."""
    whole, folder = path.stat().st_size, key.rpartition("/")[0].rpartition("/")[2]
    label = folder if folder not in ("", ".") else None
    found = FoundPicture(str(path), key.removeprefix("/"), label, why="it has no picture")
    for member in members:
        start, stop = member.offset_data, member.offset_data + member.size
        ending = member.name.rpartition("/")[2].partition(".")[2].lower()
        if not member.isfile():
            why = "it is a link, which is not followed"
            return replace(found, name=member.name, why=why)
        if stop > whole:
            why = f"it is cut short: {whole:,} bytes of {stop:,} are there"
            return replace(found, name=member.name, why=why)
        if ending == _CLASS:
            with open(path, "rb") as file:
                file.seek(start)
                label = file.read(member.size).decode(errors="replace").strip()
            found = replace(found, label=label)
        elif f".{ending.rpartition('.')[2]}" in SUFFIXES:
            why = "" if member.size else "it is empty"
            found = replace(found, name=member.name, start=start, size=member.size, why=why)
    return found


def _npz(path: Path) -> Iterator[FoundPicture]:
    try:
        headers = read_headers(path)
        if "image" not in headers:
            raise DamagedError(f"it has no array 'image', it has {', '.join(headers) or 'none'}")
        shape, dtype = headers["image"]
        if len(shape) not in (3, 4) or dtype != np.uint8:
            raise DamagedError(
                f"'image' is {dtype} {list(shape)}, and pictures are uint8 "
                "[examples, height, width, channels]"
            )
        labels = read_arrays(path, ["label"])["label"] if "label" in headers else None
        if labels is not None and (labels.shape != shape[:1] or labels.dtype.kind not in "iu"):
            raise DamagedError(
                f"'label' is {labels.dtype} {list(labels.shape)}, and classes are an integer "
                f"for each of {shape[0]} examples"
            )
    except DamagedError as error:
        yield FoundPicture(str(path), "", None, why=str(error))
        return
    for row in range(shape[0]):
        label = None if labels is None else str(labels[row])
        why = f"its class is {label}" if label and label.startswith("-") else ""
        yield FoundPicture(str(path), f"row {row}", label, start=row, why=why)
