"""The files that a path names, those that are left out, and the bytes of them that text reads.

Everything here works on names and sizes; no file is opened.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from launcher.base import fits_glob, hub, missing_path, to_type
from launcher.recipes.protocols import InputError

Fits: TypeAlias = Callable[[Path], bool]  # of a file: whether it is to be read
# Folders of the standard library that are not its source, or are its tests.
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
# What systems and tools leave in folders, beside names that begin with a dot; and what describes a
# dataset and is no part of it.
_LEFTOVERS = {"__MACOSX", "@eaDir", "$RECYCLE.BIN", "Thumbs.db", "desktop.ini", "lost+found"}
_LEFTOVERS |= {"_SUCCESS", "_temporary", "_delta_log", "_spark_metadata", "__pycache__"}
_CARDS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_TRAIN = "train"
_SPLIT = re.compile(  # what is before it, and its name; behind it may be numbers and an ending
    r"(?i)((?:.*[-_. ])?)(train(?:ing)?|val(?:id(?:ation)?)?|dev|test(?:ing)?|eval(?:uation)?)"
    r"(?:[-_. ]?(?:part|shard|of)?[-_. ]?\d+)*(?:\..*)?"
)
_MOST_NAMED = 5  # reasons for leaving files out


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


class NamedFiles(NamedTuple):
    """The files that a path names.

    Attributes:
        paths: those that are read, by name.
        left: those that are not, by the reason, in words.
        folders: the folders that were walked, each with the time of its last change before that,
            in nanoseconds.
    """

    paths: list[Path]
    left: Mapping[str, Sequence[Path]]
    folders: Mapping[Path, int]

    @property
    def left_out(self) -> str:
        """What is not read, as the end of a line, with "; " before it; empty where all is."""
        said = [
            f"{len(paths):,} {reason} ({paths[0]}{', …' if paths[1:] else ''})"
            for reason, paths in sorted(self.left.items(), key=lambda x: -len(x[1]))
            if paths
        ]
        more = f" and {len(said) - _MOST_NAMED} other kinds" if said[_MOST_NAMED:] else ""
        return f"; left out: {', '.join(said[:_MOST_NAMED])}{more}" if said else ""


def local_path(key: str, text: str, fits: hub.Fits) -> str:
    """Return the path that a setting names; files of the hub are downloaded first.

    Args:
        key: the setting.
        text: a path, or the name of a repository.
        fits: which files of that are wanted, by their paths below its folder.

    Raises:
        InputError: they cannot be had.
    """
    try:
        return str(hub.fetch(text, fits)) if hub.is_name(text) else text
    except hub.HubError as error:
        remedy = f"{error.remedy[0].lower()}{error.remedy[1:].rstrip('.')}"
        raise InputError(f"{key}={text} {error.problem}; {remedy}") from None


def is_hidden(name: str) -> bool:
    """Return whether a name is that of a hidden file, or of what a system or tool has left."""
    return name.startswith(".") or name in _LEFTOVERS


def named_files(
    named: str, path: str, fits: Fits, remedy: str, splits: str = "refused"
) -> NamedFiles:
    """Return the files that a path names: one file, those that a glob fits, or those of a folder.

    Those of a folder lie in it or in folders below it, at any depth. Where some are of the split
    `train` and others of another one, by the names of files or folders, they are not read as one.

    Args:
        named: what the user wrote, as `dataset.path=…`.
        path: the path.
        fits: returns whether a file of a folder is to be read, by its name.
        remedy: what to name instead, where there is nothing.
        splits: "train" where that one is read of several; "refused", or "folders": refused, but
            files of one folder are of one split, whatever their names.

    Raises:
        InputError: there is no such file or folder, or there are several splits.
        OSError: a folder cannot be read.
    """
    root = Path(path).expanduser()
    if re.match(r"\w+:/", path) and not root.exists():
        raise InputError(
            f"{named} is a URL; tokens, mixtures and Parquet are read from s3://… and gs://…, text "
            "and documents from hf://…: of others, copy the files and name the copy"
        )
    if root.is_dir():
        return without_splits(named, root, _walked(root, fits), splits)
    if glob.has_magic(path) and not root.is_file():
        paths = sorted(map(Path, glob.glob(str(root), recursive=True)))
        folders = [path for path in paths if path.is_dir()]
        return NamedFiles([path for path in paths if not path.is_dir()], {"folders": folders}, {})
    if not root.is_file():
        what = "is neither a file nor a folder" if root.exists() else missing_path(root)
        raise InputError(f"{named} {what}; {remedy}")
    return NamedFiles([root], {}, {})


def _walked(root: Path, fits: Fits) -> NamedFiles:
    """Return the files below a folder; links are followed, and each folder is entered once."""
    paths: list[Path] = []
    left: dict[str, list[Path]] = defaultdict(list)
    folders: dict[Path, int] = {}
    waiting, seen = [root], set()
    for folder in waiting:
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:
            left["links to folders that are read"].append(folder)
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[folder] = status.st_mtime_ns
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path = folder / entry.name
            if is_hidden(entry.name):
                left["hidden"].append(path)
            elif entry.is_dir():
                waiting.append(path)
            elif entry.name not in _CARDS and fits(path):
                paths.append(path)
            else:
                left[_ending(path)].append(path)
    return NamedFiles(sorted(paths), left, folders)


def _ending(path: Path) -> str:
    return f"*{path.suffix}" if path.suffix else "without an ending"


def files_below(root: Path, listed: Iterable[Path], fits: Fits) -> NamedFiles:
    """Return of all files that are listed those below a folder, as those on a disk are."""
    paths: list[Path] = []
    left: dict[str, list[Path]] = defaultdict(list)
    folders: dict[Path, int] = {}
    for path in (path for path in listed if root in path.parents):
        parts = path.relative_to(root).parts
        folders |= dict.fromkeys(itertools.islice(path.parents, len(parts)), 0)
        if any(map(is_hidden, parts)):
            left["hidden"].append(path)
        elif path.name not in _CARDS and fits(path):
            paths.append(path)
        else:
            left[_ending(path)].append(path)
    return NamedFiles(sorted(paths), left, folders)


def without_splits(named: str, root: Path, found: NamedFiles, splits: str) -> NamedFiles:
    """Return the files less those of other splits than `train`, or refuse such splits.

    The arguments are those of `named_files`, with the folder and all its files.
    """
    paths, left = list(found.paths), dict(found.left)
    entries = {path.parent for path in found.paths} if splits == "folders" else found.paths
    for group in _splits(root, entries):
        train, *others = sorted(group, key=lambda one: (not one.startswith(_TRAIN), "test" in one))
        if splits != _TRAIN:
            key = named.partition("=")[0]
            words = [(key, str(_glob_of(group[train])))]
            if key == "dataset.path":
                words.append(("dataset.validation_path", str(_glob_of(group[others[0]]))))
            raise InputError(
                f"{named} holds the splits {', '.join([train, *others])}, which are not one; name "
                f"what to read: {to_type(*words)}"
            )
        for name in others:
            held = set(itertools.chain(*group[name].values()))
            left[f"of the split {name}"] = [*left.get(f"of the split {name}", ()), *sorted(held)]
            paths = [path for path in paths if path not in held]
    return NamedFiles(paths, left, found.folders)


def _splits(root: Path, paths: Iterable[Path]) -> list[dict[str, dict[Path, list[Path]]]]:
    """Return the splits in each place where one of several is `train`: their files by entry.

    The entries are files or folders of one folder whose names differ only in that of the split, as
    `train-00000-of-00012.parquet` and `test.parquet`.
    """
    places: dict[tuple[Path, str], dict[str, dict[Path, list[Path]]]] = {}
    for path in paths:
        for entry in itertools.takewhile(lambda one: one != root, (path, *path.parents)):
            if match := _SPLIT.fullmatch(entry.name):
                place = places.setdefault((entry.parent, match[1]), {})
                place.setdefault(match[2].lower(), {}).setdefault(entry, []).append(path)
    of_several = (place for place in places.values() if len(place) > 1)
    return [place for place in of_several if any(name.startswith(_TRAIN) for name in place)]


def _glob_of(entries: Iterable[Path]) -> Path:
    """Return the only one of these, or a glob of what all are called."""
    first, *more = entries
    return first.with_name(re.sub(r"\d+", "*", first.name)) if more else first


def with_ending(endings: Collection[str]) -> Fits:
    """Return whether a file has one of these endings, in small letters or capitals."""
    return lambda path: path.suffix.lower() in endings


def fitting(root: Path, pattern: str) -> Fits:
    """Return whether files below a folder fit `dataset.pattern`; raises InputError if none can."""
    try:
        return set(root.glob(pattern)).__contains__
    except (ValueError, NotImplementedError) as error:
        raise InputError(
            f"dataset.pattern={pattern} is not a pattern for files below a folder ({error}); "
            "use one like **/*.txt"
        ) from None


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


def find_text(path: str, pattern: str) -> tuple[list[FileSlice], str]:
    """Return the non-empty files that a path names, by name; and what is not read.

    Args:
        path: a file, a folder or a glob.
        pattern: a glob that the files of a folder fit.

    Returns:
        The files, and those that are not read in words (`NamedFiles.left_out`).

    Raises:
        InputError: there is none, or one may not be read.
    """
    named = f"dataset.path={path}"
    path = local_path("dataset.path", path, lambda file: fits_glob(file, pattern))
    root = Path(path).expanduser()
    remedy = "name a text file, or a folder whose files fit dataset.pattern"
    found = named_files(named, path, fitting(root, pattern), remedy, _TRAIN)
    if not found.paths:
        raise InputError(
            f"dataset.pattern={pattern} fits no file below {named}{found.left_out}; "
            "change either, for example dataset.pattern='**/*'"
        )
    for candidate in found.paths:
        if not os.access(candidate, os.R_OK):
            raise InputError(
                f"{named}: you may not read {candidate}; "
                "change its permissions or name another path"
            )
    common = Path(os.path.commonpath([path.parent for path in found.paths]))
    pieces = _whole(found.paths, root if root.is_dir() else common)
    if not pieces:
        what = f"holds only empty files for {pattern}" if root.is_dir() else "is empty"
        raise InputError(f"{named} {what}; name a file or folder with text in it")
    return pieces, found.left_out


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
