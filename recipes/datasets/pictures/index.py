"""Index of a dataset's pictures: scanned once, kept in the launcher's cache folder.

What is kept is valid while the times of all folders, or the names, sizes and times of the files,
are the same. It is written whole or not at all, so that several processes may make it at once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from launcher.arrays.npz import read_arrays, write_arrays
from launcher.base import DamagedError
from launcher.base.measurements import cache_folder
from launcher.recipes import InputError
from launcher.recipes.data.files import fingerprint_of
from launcher.recipes.data.skipping import BadSampleError
from launcher.recipes.datasets.pictures.decode import check_whole, open_picture
from launcher.recipes.datasets.pictures.scan import FoundPicture, classed, scanned, source_files

_FORMAT = 2
_SAMPLES = 16  # of the files of a folder, whose content goes into a fingerprint
_THREADS = 16
_AT_ONCE = 1024  # pictures that are checked together

Progress = Callable[[float], None]


@dataclass(frozen=True)
class PictureSource:
    """What the settings say of where pictures are.

    Attributes:
        path: what is named.
        format: folder, tar or npz.
        bad: what follows a bad picture: refuse or skip.
        key: the setting that names `path`.
    """

    path: str
    format: str
    bad: str
    key: str = "dataset.path"


@dataclass(frozen=True)
class PictureIndex:
    """The pictures of a source, in order.

    Attributes:
        files: the files that they are in.
        names: what each is called in its file; "" where the file is the picture.
        file: the number of each one's file, int64 [N].
        start: where each begins there, int64 [N].
        size: the bytes of each, int64 [N].
        label: the number of each one's class, -1 where it has none, int64 [N].
        classes: the classes' names, sorted.
        bad: the pictures that are left out, each with the reason.
        notes: what else is not read, in words, each with "; " before it.
    """

    files: tuple[str, ...]
    names: tuple[str, ...]
    file: np.ndarray
    start: np.ndarray
    size: np.ndarray
    label: np.ndarray
    classes: tuple[str, ...]
    bad: tuple[str, ...]
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.file)

    def place(self, number: int) -> str:
        """Return where a picture is, in words."""
        file, name = self.files[self.file[number]], self.names[number]
        return f"{file}, {name}" if name else file


def load_index(source: PictureSource, progress: Progress = lambda share: None) -> PictureIndex:
    """Return the index of a source, kept or made.

    Args:
        source: where the pictures are.
        progress: takes the share done, 0 to 1.

    Raises:
        InputError: the source holds no picture, or a bad one under `bad=error`.
        OSError: a file cannot be read.
    """
    kept = kept_index(source)
    if kept is not None:
        return kept
    files = source_files(source.path, source.format, source.key)
    root, notes = Path(source.path).expanduser(), [files.left_out]
    # As they were before the scan: what changes during it is scanned again.
    stamps: dict[str, Any] = {str(folder): time for folder, time in files.folders.items()}
    found: list[FoundPicture] = []
    if source.format == "folder" and root.is_dir():
        found, empty = classed(root, files)
        notes += [f"; no picture is in {name}" for name in empty]
    else:
        stamps |= {str(file): _stamp(file) for file in files.paths}
        for number, file in enumerate(files.paths):
            found += scanned(file, source.format)
            progress((number + 1) / len(files.paths) / 2)
    good, bad = [one for one in found if not one.why], [one for one in found if one.why]
    if source.bad == "refuse" and bad:
        raise refused_picture(f"{bad[0].place}: {bad[0].why}")
    if source.bad == "skip":
        good, damaged = _whole(good, source.format, progress)
        bad += damaged
    if not good:
        first = f" ({bad[0].place}: {bad[0].why})" if bad else ""
        raise InputError(f"{source.key}={source.path} holds no picture{first}; name another")
    index = _index(good, bad, notes)
    _keep(source, stamps, index)
    return index


def kept_index(source: PictureSource) -> PictureIndex | None:
    """Return the index that is kept, if it is still valid; raises InputError as `load_index`."""
    files = None
    if not Path(source.path).expanduser().is_dir():  # a glob may fit other files now
        files = set(map(str, source_files(source.path, source.format, source.key).paths))
    try:
        found: dict[str, Any] = dict(read_arrays(_home(source)))
        stamps = json.loads(found.pop("stamps").tobytes())
        if files not in (None, stamps.keys()) or stamps != {p: _stamp(Path(p)) for p in stamps}:
            return None
        texts = json.loads(found.pop("texts").tobytes())
        found |= {name: tuple(text) for name, text in texts.items()}
        return PictureIndex(**found)
    except (OSError, DamagedError, ValueError, KeyError, TypeError):
        return None


def refused_picture(what: str) -> InputError:
    """Return the error for a bad picture."""
    return InputError(f"{what}; fix it, or leave bad pictures out with dataset.bad=skip")


def index_fingerprint(source: PictureSource, index: PictureIndex) -> str:
    """Return a digest of the pictures: classes, names and sizes of all, and samples of content."""
    digest = hashlib.sha256()
    names = index.names if any(index.names) else [Path(file).name for file in index.files]
    digest.update(json.dumps([names, index.classes]).encode())
    for array in (index.label, index.start, index.size):
        digest.update(array.tobytes())
    paths = [Path(file) for file in index.files]
    if source.format == "folder":
        # As they are now: an index is not made again where a file's content alone has changed.
        sizes = [path.stat().st_size if path.is_file() else -1 for path in paths]
        digest.update(np.array(sizes, np.int64).tobytes())
        paths = [paths[i * len(paths) // _SAMPLES] for i in range(_SAMPLES)]
        paths = [path for path in paths if path.is_file()]
    digest.update(fingerprint_of(paths).encode())
    return digest.hexdigest()[:32]


def _index(good: list[FoundPicture], bad: list[FoundPicture], notes: list[str]) -> PictureIndex:
    files = {name: number for number, name in enumerate(dict.fromkeys(one.file for one in good))}
    classes = sorted({one.label for one in good if one.label is not None})
    numbers = {name: number for number, name in enumerate(classes)}
    labels = [-1 if one.label is None else numbers[one.label] for one in good]
    return PictureIndex(
        tuple(files),
        tuple(one.name for one in good),
        np.array([files[one.file] for one in good], np.int64),
        np.array([one.start for one in good], np.int64),
        np.array([one.size for one in good], np.int64),
        np.array(labels, np.int64),
        tuple(classes),
        tuple(f"{one.place}: {one.why}" for one in bad),
        tuple(notes),
    )


def _whole(
    pictures: list[FoundPicture], format: str, progress: Progress
) -> tuple[list[FoundPicture], list[FoundPicture]]:
    """Decode all pictures; return those that are whole, and the others with the reason."""

    def reason(one: FoundPicture) -> str:
        try:
            check_whole(open_picture(one.file, one.start, one.size, format))
        except BadSampleError as error:
            return str(error)
        return ""

    good: list[FoundPicture] = []
    bad: list[FoundPicture] = []
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        for first in range(0, len(pictures), _AT_ONCE):
            some = pictures[first : first + _AT_ONCE]
            for one, why in zip(some, pool.map(reason, some), strict=True):
                (bad if why else good).append(replace(one, why=why))
            progress(0.5 + (first + len(some)) / len(pictures) / 2)
    return good, bad


def _keep(source: PictureSource, stamps: Mapping[str, Any], index: PictureIndex) -> None:
    texts = {name: getattr(index, name) for name in ("files", "names", "classes", "bad", "notes")}
    arrays = {name: getattr(index, name) for name in ("file", "start", "size", "label")}
    arrays |= {"texts": _bytes(texts), "stamps": _bytes(stamps)}
    with suppress(OSError):  # without a cache it is made at each start
        home = _home(source)
        home.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(home, arrays, private=True)


def _bytes(value: object) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _home(source: PictureSource) -> Path:
    path = os.path.abspath(os.path.expanduser(source.path))
    whole = [_FORMAT, path, source.format, source.bad]
    name = hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:32]
    return cache_folder() / "pictures" / f"{name}.npz"


def _stamp(path: Path) -> int | list[int]:
    """Return the time of a folder's last change, and of a file its size, too."""
    status = path.stat()
    return status.st_mtime_ns if path.is_dir() else [status.st_size, status.st_mtime_ns]
