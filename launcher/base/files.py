"""Small files: written whole by one function, read by one strict reader. Standard library only.

It writes and reads all that a run keeps beside its arrays and metrics, and files of other users.
"""

from __future__ import annotations

import difflib
import errno
import itertools
import json
import logging
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # temporary: space can be freed
LARGEST = 2**27  # bytes of a file that is read whole
DEEPEST = 100  # levels of nested lists and tables
DAMAGED = ".damaged"
_MOST_SAID = 300  # characters
_MOST_ENTRIES = 10_000  # of a folder, searched for a near name
_WRITING_SECONDS = 60  # a younger file may still be being written


class DamagedError(ValueError):
    """An error raised when a file does not hold what was written there.

    Its message is one short line that says what is wrong.
    """

    def __init__(self, what: str) -> None:
        line = " ".join(what.split())
        super().__init__(line if len(line) <= _MOST_SAID else f"{line[: _MOST_SAID - 1]}…")


def write_whole(
    path: Path,
    content: str | bytes | Callable[[IO[bytes]], None],
    private: bool = False,
    durable: bool = True,
) -> None:
    """Write a file whole or not at all.

    Args:
        path: the file.
        content: its content, text in UTF-8; or a function that writes it to the file.
        private: whether only this user may read it; otherwise the umask decides.
        durable: whether to wait until it is on the disk.

    Raises:
        OSError: it cannot be written; the error names the file.
    """
    try:
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(partial, flags, 0o600 if private else 0o666)
        try:
            with open(descriptor, "wb") as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                if durable:
                    os.fsync(descriptor)
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)
            raise
        if durable:
            sync_folder(path.parent)
    except OSError as error:
        raise named(error, path) from None


def clear_partial(folder: Path) -> None:
    """Delete the files that a killed `write_whole` left in `folder`."""
    for left in folder.glob(f"*.{'[0-9a-f]' * 8}.partial"):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > _WRITING_SECONDS:
                left.unlink()


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk.

    Raises:
        OSError: the folder cannot be opened, or the disk fails.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents for this user alone, whatever the umask is.

    Raises:
        OSError: one of them cannot be made.
    """
    for each in reversed((folder, *folder.parents)):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)


def exposed(folder: Path, trust_group: bool = False) -> Path | None:
    """Return a folder through which others could replace files of this user in `folder`.

    That is the first of `folder` and its parents that lets others than this user and the system
    rename or replace `folder` itself, or this user's entries of it; None if there is none.

    Args:
        folder: a resolved path, since the target of a link may change.
        trust_group: whether to trust groups and the owners of the folders too: the members of a
            project share their folders.
    """
    trusted = {os.getuid(), 0, *_unmapped_owner()}
    others = stat.S_IWOTH if trust_group else stat.S_IWGRP | stat.S_IWOTH
    for above in (folder, *folder.parents):
        status = above.stat()
        owned = status.st_uid in trusted
        # In a sticky folder only the owners of the entry and of the folder may rename it.
        sticky = status.st_mode & stat.S_ISVTX
        shared = status.st_mode & others and not (sticky and owned)
        if shared or not (owned or trust_group):
            return above
    return None


def _unmapped_owner() -> list[int]:
    """Return the user number, if there is one, that stands for all users a container does not map.

    Inside such a container it stands for the machine's own users too, root among them.
    """
    try:
        mapped = Path("/proc/self/uid_map").read_text().splitlines()
        if sum(int(line.split()[2]) for line in mapped) >= 2**32 - 1:
            return []
        return [int(Path("/proc/sys/kernel/overflowuid").read_text())]
    except OSError:
        return []


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file, as `os.open` does; refuse a FIFO, which would block, or a device.

    Raises:
        OSError: it cannot be opened.
        DamagedError: it is not a regular file; with O_NOFOLLOW, it may be a link.
    """
    with suppress(FileNotFoundError):
        status = path.stat(follow_symlinks=not flags & os.O_NOFOLLOW)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError("it is not a regular file")
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedError("it is not a regular file")
    return descriptor


def open_own(path: Path, flags: int) -> int:
    """Open a file of a run to write it, as `os.open` does.

    Anything else that stands in its place, such as a link, is set aside with a warning. It raises
    the errors of `open_regular`.
    """
    flags |= os.O_CREAT | os.O_NOFOLLOW
    try:
        return open_regular(path, flags)
    except DamagedError as error:
        _log.warning(set_aside(path, str(error)))
        return open_regular(path, flags)


def read_private(path: Path) -> bytes:
    """Return the content of a file that only this user can write and read.

    Raises:
        OSError: it cannot be read.
        DamagedError: it is not a regular file, or belongs to others too.
    """
    descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        os.close(descriptor)
        raise DamagedError(f"{path} is open to other users")
    return _read(descriptor, LARGEST)


def read_bytes(path: Path, most: int = LARGEST) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: it cannot be read.
        DamagedError: it is not a regular file, or is larger than `most` bytes.
    """
    return _read(open_regular(path, os.O_RDONLY), most)


def _read(descriptor: int, most: int) -> bytes:
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > most:
            raise DamagedError(f"it is larger than {most:,} bytes")
        return file.read()


def read_text(path: Path, most: int = LARGEST) -> str:
    """Return the content of a file as text in UTF-8; see `read_bytes`."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError:
        raise DamagedError("it is not text in UTF-8") from None


def read_json(path: Path) -> Any:
    """Return the value of a JSON file; see `read_text` and `parse_json`."""
    return parse_json(read_text(path))


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    All its numbers are finite, and all its strings can be written and be part of a path.

    Raises:
        DamagedError: the text holds anything else.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise DamagedError("it is nested too deeply") from None
    except ValueError as error:
        raise DamagedError(f"it is not JSON ({error})") from None
    _check(value)
    return value


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _check(value: Any, levels: int = DEEPEST) -> None:
    if isinstance(value, str):
        if "\0" in value or (not value.isascii() and re.search("[\ud800-\udfff]", value)):
            raise DamagedError("it holds text with invalid characters")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise DamagedError("it holds a number that is not finite")
    elif isinstance(value, list | dict):
        if not levels:
            raise DamagedError("it is nested too deeply")
        for one in value if isinstance(value, list) else (*value, *value.values()):
            _check(one, levels - 1)


def read_own(path: Path, convert: Callable[[Any], T]) -> T | None:
    """Return the converted value of a run's own JSON file, or None if there is no file.

    A damaged file is set aside with a warning, and None is returned.

    Args:
        path: the file.
        convert: converts the value; it raises ValueError for one that cannot be right.
    """
    try:
        return convert(read_json(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        _log.warning(set_aside(path, str(error)))
        return None


def set_aside(path: Path, problem: str) -> str:
    """Rename a damaged file or folder, so that it is neither used nor lost.

    It keeps its name if it cannot be renamed.

    Args:
        path: the file or folder.
        problem: what is wrong with it.

    Returns:
        The line that reports it to the user.
    """
    kept = aside(path)
    try:
        path.rename(kept)
        where = f"; it is kept as {kept.name}"
    except OSError:
        where = ""
    return f"{path} is damaged and not used: {problem}{where}"


def aside(path: Path) -> Path:
    """Return an unused name beside `path` for a damaged file."""
    kept, number = path.with_name(f"{path.name}{DAMAGED}"), 1
    while os.path.lexists(kept):
        number += 1
        kept = path.with_name(f"{path.name}{DAMAGED}-{number}")
    return kept


def named(error: OSError, path: Path) -> OSError:
    """Return `error` with the name of the file, which the error of a failed write lacks."""
    return OSError(error.errno, error.strerror or str(error), str(path))


def missing_path(path: Path) -> str:
    """Return the clause of an error for a missing path, with the nearest name in its folder."""
    try:
        some = itertools.islice(path.parent.iterdir(), _MOST_ENTRIES)
        there = [entry.name for entry in some if entry.name != path.name]  # a link to nowhere is
    except OSError:
        there = []
    near = difflib.get_close_matches(path.name, there, n=1, cutoff=0.75)
    return f"does not exist ({path.with_name(near[0])} does)" if near else "does not exist"


def fits_glob(path: str, pattern: str) -> bool:
    """Return whether a path fits a glob, as one on a disk; `**` stands for folders at any depth."""
    return _fit(path.split("/"), pattern.split("/"))


def _fit(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns or not parts:
        return not parts and all(pattern == "**" for pattern in patterns)
    first, *others = patterns
    if first == "**":
        is_shown = not parts[0].startswith(".")
        return _fit(parts, others) or (is_shown and _fit(parts[1:], patterns))
    is_shown = parts[0].startswith(".") == first.startswith(".")
    return is_shown and fnmatchcase(parts[0], first) and _fit(parts[1:], others)
