"""Detects damaged checkpoints by `checksums.json`, which holds every file's size and SHA-256.

The file also holds the step. It is written last, before a checkpoint gets its name, and read first,
before any other file is trusted. It includes a checksum of itself and has only one valid layout, so
that a change to it is noticed, too. Standard library only: the driver checks before JAX is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from launcher.base import parse_json, read_text, write_whole
from launcher.checkpoint.layout import CHECKSUMS, METADATA, is_step

S = TypeVar("S")
T = TypeVar("T")

_ALGORITHM = "sha256"
_THREADS = 8  # hashing and reading release the interpreter's lock

# A file's size in bytes and its checksum in hexadecimal digits, by its path below the checkpoint.
Sums = Mapping[str, tuple[int, str]]


def checksums(root: Path, paths: Iterable[Path], sync: bool = False) -> dict[str, tuple[int, str]]:
    """Return the checksums of files by their path below `root`.

    Args:
        root: the checkpoint.
        paths: files below it.
        sync: whether to force each file to the disk.

    Raises:
        OSError: a file cannot be read.
    """
    listed = sorted(paths)
    sums = _in_threads(lambda path: _sum(path, sync), listed)
    return {str(path.relative_to(root)): sum_ for path, sum_ in zip(listed, sums, strict=True)}


def _in_threads(function: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Map `function` over `items` in several threads; an interrupt does not wait for them."""
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="checksums")
    try:
        return list(pool.map(function, items))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def files_below(folder: Path) -> list[Path]:
    """Return all files in a folder and its subfolders."""
    return [path for path in folder.rglob("*") if path.is_file()]


def write_checksums(root: Path, step: int, sums: Sums) -> None:
    """Write the `checksums.json` of `root`, which is the state after `step` steps."""
    write_whole(root / CHECKSUMS, _text(step, sums))


def damage(root: Path, thorough: bool = True) -> str | None:
    """Return what is wrong with a checkpoint, naming the file; None if it is intact.

    A folder whose name is another step than that of its contents counts as damaged.

    Args:
        root: the checkpoint.
        thorough: whether to read every file; otherwise only the metadata is read, and the sizes of
            the other files are compared.
    """
    try:
        step, sums = _read(root / CHECKSUMS)
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except OSError as error:
        return f"{CHECKSUMS} cannot be read ({error.strerror})"
    except ValueError:
        return f"{CHECKSUMS} is damaged"
    if is_step(root.name) and root.name != str(step):
        return f"{CHECKSUMS} is of step {step}; the folder was renamed or copied"
    base = Path(os.path.realpath(root))
    wrong = [problem for name, (size, _) in sums.items() if (problem := _size(base, name, size))]
    if not wrong:
        to_read = [(name, sums[name][1]) for name in sums if thorough or name == METADATA]
        problems = _in_threads(lambda item: _contents(root, *item), to_read)
        wrong = [problem for problem in problems if problem]
    if not wrong:
        return None
    return wrong[0] if len(wrong) == 1 else f"{wrong[0]}, and {len(wrong) - 1} files more"


def _size(root: Path, name: str, size: int) -> str | None:
    path = Path(os.path.realpath(root / name))
    if not path.is_relative_to(root):
        return f"{CHECKSUMS} names {name}, which is not below it"
    try:
        if not path.is_file():
            return f"{name} is missing"
        actual = path.stat().st_size
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if actual == size else f"{name} has {actual} bytes of {size}"


def _contents(root: Path, name: str, checksum: str) -> str | None:
    try:
        actual = _sum(root / name, sync=False)[1]
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if actual == checksum else f"{name} is not what was written"


def _sum(path: Path, sync: bool) -> tuple[int, str]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, _ALGORITHM).hexdigest()
        if sync:
            os.fsync(file.fileno())
        return file.tell(), digest


def _text(step: int, sums: Sums) -> str:
    files = {name: {"bytes": size, _ALGORITHM: digest} for name, (size, digest) in sums.items()}
    tree = {"files": files, "step": step}
    own = hashlib.new(_ALGORITHM, json.dumps(tree, sort_keys=True).encode()).hexdigest()
    return json.dumps({**tree, _ALGORITHM: own}, indent=1, sort_keys=True) + "\n"


def _read(path: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    """Read the step and the checksums.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged.
    """
    text = read_text(path)
    sums: dict[str, tuple[int, str]] = {}
    try:
        tree: dict[str, Any] = parse_json(text)
        step = tree["step"]
        for name, entry in tree["files"].items():
            size, digest = entry["bytes"], entry[_ALGORITHM]
            if not isinstance(size, int) or not isinstance(digest, str) or "\0" in name:
                raise ValueError
            sums[name] = size, digest
    except (KeyError, TypeError, AttributeError):
        raise ValueError from None
    if not sums or not isinstance(step, int) or _text(step, sums) != text:
        raise ValueError
    return step, sums
