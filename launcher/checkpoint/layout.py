"""Checkpoint directory layout, and which entries are complete and intact.

    checkpoints/40/                     a checkpoint: the state after 40 steps
      checksums.json                    size and SHA-256 of all other files, and its own
      _CHECKPOINT_METADATA              Orbax's, with our metadata in it
      default/                          the arrays, in Orbax's format
    checkpoints/50.partial-<token>/     one that is being written, or never was finished
    checkpoints/30.damaged/             one that was set aside
    checkpoints/best.json               which one had the best evaluation, if that is asked for

`checksums.json` also holds the step. It is written last, before a checkpoint gets its name, and
read first, before any other file is trusted. It has only one valid layout, so that a change to it
is noticed, too. Other files there are left alone. Standard library only: the driver checks before
JAX is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from launcher.base import parse_json, read_json, read_text, sync_folder, write_whole

CHECKSUMS = "checksums.json"
METADATA = "_CHECKPOINT_METADATA"
ARRAYS = "default"
BEST = "best.json"
_PARTIAL = ".partial-"
S = TypeVar("S")
T = TypeVar("T")
_ALGORITHM = "sha256"
_THREADS = 8  # hashing and reading release the interpreter's lock
# A file's size in bytes and its checksum in hexadecimal digits, by its path below the checkpoint.
Sums = Mapping[str, tuple[int, str]]


def steps_in(folder: Path) -> list[int]:
    """Return the steps that `folder` holds checkpoints of, intact or damaged, oldest first.

    A missing folder holds none, and empty folders are no checkpoints. Raises OSError.
    """
    if not folder.is_dir():
        return []
    folders = [path for path in folder.iterdir() if is_step(path.name) and path.is_dir()]
    return sorted(int(path.name) for path in folders if not _is_empty(path))


def _is_empty(path: Path) -> bool:
    try:
        return not any(path.iterdir())
    except OSError:  # its contents cannot be read: damaged, but not empty
        return False


def read_metadata(folder: Path, step: int) -> dict[str, Any]:
    """Return the `metadata` that `folder/<step>` was saved with.

    Raises:
        OSError: it cannot be read.
        ValueError, KeyError, TypeError: it is damaged.
    """
    metadata: dict[str, Any] = read_json(folder / str(step) / METADATA)["custom_metadata"]
    return metadata


def write_best(folder: Path, step: int, metric: str, value: float) -> None:
    """Note which checkpoint of a folder has the best evaluation."""
    content = {"step": step, "metric": metric, "value": value}
    write_whole(folder / BEST, json.dumps(content) + "\n")


def best_step(folder: Path) -> int | None:
    """Return the step of the checkpoint with the best evaluation; None where none is noted."""
    try:
        step = read_json(folder / BEST)["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def copy_checkpoint(source: Path, final: Path, metadata: dict[str, Any], link: bool) -> None:
    """Copy an intact checkpoint with other `metadata`, completely or not at all.

    Args:
        source: the checkpoint.
        final: its copy, which is not there yet.
        metadata: JSON-able metadata.
        link: whether its other files may be hard links, which take no room: nobody changes them.

    Raises:
        OSError: a file cannot be read or written.
    """
    partial = partial_path(final, "copy")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, copy_function=_link if link else shutil.copyfile)
    step, sums = _read(source / CHECKSUMS)
    tree = {**read_json(source / METADATA), "custom_metadata": metadata}
    write_whole(partial / METADATA, json.dumps(tree, allow_nan=False))
    write_checksums(partial, step, {**sums, **checksums(partial, [partial / METADATA])})
    partial.rename(final)
    sync_folder(final.parent)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, another user's, or a file system without links
        shutil.copyfile(source, target)


def stays(folder: Path, step: int) -> bool:
    """Return whether `folder/<step>` must never be deleted, as long as it is the best.

    That holds for the multiples of `every_steps` as it was set when the checkpoint was saved,
    whatever a later start sets; and for a checkpoint whose setting cannot be read.
    """
    path = folder / str(step) / METADATA
    if step == best_step(folder):
        return True
    try:
        every = _every_steps(path, path.stat().st_mtime_ns)
        return every > 0 and step % every == 0
    except (OSError, ValueError, KeyError, TypeError):
        return True


@functools.cache  # asked for each checkpoint at every save
def _every_steps(path: Path, modified: int) -> int:
    every: int = read_json(path)["custom_metadata"]["config"]["train"]["checkpoint"]["every_steps"]
    return every


def partial_path(final: Path, token: str) -> Path:
    """Return the path where the checkpoint `final` is written until it is complete."""
    return final.with_name(f"{final.name}{_PARTIAL}{token}")


def clear_partial_saves(folder: Path) -> None:
    """Delete the remains of interrupted saves; call it only while nobody writes there."""
    for path in folder.glob(f"*{_PARTIAL}*") if folder.is_dir() else ():
        if is_step(path.name.partition(_PARTIAL)[0]):
            shutil.rmtree(path, ignore_errors=True)


def is_step(name: str) -> bool:
    """Return whether a checkpoint may have that name."""
    return name.isascii() and name.isdigit() and str(int(name)) == name


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
    sums = in_threads(lambda path: _sum(path, sync), listed)
    return {str(path.relative_to(root)): sum_ for path, sum_ in zip(listed, sums, strict=True)}


def in_threads(
    function: Callable[[S], T], items: Iterable[S], threads: int = _THREADS, wait: bool = False
) -> list[T]:
    """Map `function` over `items` in several threads; the first error ends it.

    Unless it is to `wait`, an error or an interrupt leaves threads to end by themselves.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="checkpoint")
    try:
        return list(pool.map(function, items))
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)


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
        problems = in_threads(lambda item: _contents(root, *item), to_read)
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
