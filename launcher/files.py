"""Small files: written whole by one function, read by one strict reader. Standard library only.

All that a run keeps beside its arrays and its metrics goes through here, and so does what others
hand to it. Nothing that stands in a file's place, or in the file, holds the reader up or takes its
memory: a FIFO, a device, a gigabyte, a thousand brackets.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # what may pass: space can be freed
LARGEST = 2**27  # bytes of a file that is read as a whole
DEEPEST = 100  # levels of lists and tables in one another
DAMAGED = ".damaged"
_PART = 2**22  # bytes that are read at a time
_SAID = 300  # characters
_WRITING_SECONDS = 60  # younger than this, a file may still be written
_NO_FILE = "it is no regular file"


class DamagedError(ValueError):
    """A file does not hold what was written there: what is wrong, in one line of a few words."""

    def __init__(self, what: str) -> None:
        line = " ".join(what.split())
        super().__init__(line if len(line) <= _SAID else f"{line[: _SAID - 1]}…")


def write_whole(path: Path, content: str | bytes, private: bool = False) -> None:
    """Write a file whole or not at all, and wait until it is on the disk; text in UTF-8.

    A `private` one is its user's alone to read, any other one as the umask says. Raises OSError
    with the file's name.
    """
    try:
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(partial, flags, 0o600 if private else 0o666)
        try:
            with open(descriptor, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(descriptor)
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise named(error, path) from None


def clear_partial(folder: Path) -> None:
    """Delete what a `write_whole` into `folder` that was killed has left."""
    for left in folder.glob(f"*.{'[0-9a-f]' * 8}.partial"):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > _WRITING_SECONDS:
                left.unlink()


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private(folder: Path) -> None:
    """Make a folder, and each above it that is not there, for this user alone, whatever the umask
    is. Raises OSError."""
    for each in reversed((folder, *folder.parents)):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)


def exposed(folder: Path, trust_group: bool = False) -> Path | None:
    """Which of `folder` and those above it lets others than this user and the system rename or
    replace an entry of `folder` that is this user's, or `folder` itself; None where none does.

    Args:
        folder: a resolved path, for what links say may change.
        trust_group: whether groups and the folders' owners are trusted, too: a project's members
            share their folders.
    """
    trusted = {os.getuid(), 0, *_unmapped_owner()}
    others = stat.S_IWOTH if trust_group else stat.S_IWGRP | stat.S_IWOTH
    for above in (folder, *folder.parents):
        status = above.stat()
        owned = status.st_uid in trusted
        sticky = status.st_mode & stat.S_ISVTX  # keeps off all but the owners of entry and folder
        shared = status.st_mode & others and not (sticky and owned)
        if shared or not (owned or trust_group):
            return above
    return None


def _unmapped_owner() -> list[int]:
    """The number that stands for the machine's own users, root among them, where this process is
    in a container that maps only some of them."""
    try:
        mapped = Path("/proc/self/uid_map").read_text().splitlines()
        if sum(int(line.split()[2]) for line in mapped) >= 2**32 - 1:
            return []
        return [int(Path("/proc/sys/kernel/overflowuid").read_text())]
    except OSError:
        return []


def open_regular(path: Path, flags: int) -> int:
    """`os.open` of a regular file, which nothing waits for: a FIFO would have it wait for ever.
    Raises OSError, and DamagedError where something else is there: with O_NOFOLLOW, also a link."""
    with suppress(FileNotFoundError):
        status = path.stat(follow_symlinks=not flags & os.O_NOFOLLOW)
        if not stat.S_ISREG(status.st_mode):  # opening a device may do something
            raise DamagedError(_NO_FILE)
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedError(_NO_FILE)
    return descriptor


def open_own(path: Path, flags: int, say: Callable[[str], None] = lambda text: None) -> int:
    """`os.open` of a file of a run's own, to write it: whatever else stands in its place, a link
    too, is set aside, and `say` is told. Raises like `open_regular`."""
    flags |= os.O_CREAT | os.O_NOFOLLOW
    try:
        return open_regular(path, flags)
    except DamagedError as error:
        say_aside(path, str(error), say)
        return open_regular(path, flags)


def read_private(path: Path) -> bytes:
    """Like `read_bytes`, of a file that only this user can have written, and only he can read."""
    descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        os.close(descriptor)
        raise DamagedError(f"{path} is not this user's alone")
    return _read(descriptor, LARGEST)


def read_bytes(path: Path, most: int = LARGEST) -> bytes:
    """What a file holds. Raises OSError, and DamagedError where it is no file, or a larger one."""
    return _read(open_regular(path, os.O_RDONLY), most)


def _read(descriptor: int, most: int) -> bytes:
    with open(descriptor, "rb") as file:
        data = bytearray()
        while part := file.read(_PART):
            data += part
            if len(data) > most:
                raise DamagedError(f"it is larger than {most:,} bytes")
    return bytes(data)


def read_text(path: Path, most: int = LARGEST) -> str:
    """Like `read_bytes`, as UTF-8."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError:
        raise DamagedError("it is not text in UTF-8") from None


def read_json(path: Path) -> Any:
    """Like `read_text`, as JSON."""
    return parse_json(read_text(path))


def parse_json(text: str | bytes) -> Any:
    """The value that JSON text stands for; all its numbers are finite, and all its text can be
    written and be part of a path. Raises DamagedError."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise DamagedError("it is nested too deeply") from None
    except ValueError as error:
        raise DamagedError(f"it is not JSON ({error})") from None
    _check(value)
    return value


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of it")


def _check(value: Any) -> None:
    """Level by level: a value may be deeper than Python's stack."""
    level = [value]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for one in level:
            if isinstance(one, str):
                if "\0" in one or not (one.isascii() or _can_be_written(one)):
                    raise DamagedError("it holds text with characters that no text has")
            elif isinstance(one, float):
                if not math.isfinite(one):
                    raise DamagedError("it holds a number that is not finite")
            elif isinstance(one, list):
                below += one
            elif isinstance(one, dict):
                below += one.keys()
                below += one.values()
        if not below:
            return
        level = below
    raise DamagedError("it is nested too deeply")


def _can_be_written(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_own(path: Path, made: Callable[[Any], T], say: Callable[[str], None]) -> T | None:
    """What `made` makes of a JSON file of a run's own; None where there is none. A damaged one is
    set aside, and `say` is told in a line.

    Args:
        made: raises ValueError for what cannot be in the file.
    """
    try:
        return made(read_json(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        say_aside(path, str(error), say)
        return None


def say_aside(path: Path, problem: str, say: Callable[[str], None]) -> None:
    """Set a damaged file or folder aside, and say so in a line."""
    kept = set_aside(path)
    where = f"; it is kept as {kept.name}" if kept else ""
    say(f"{path} is damaged and not used: {problem}{where}")


def set_aside(path: Path) -> Path | None:
    """Rename a damaged file or folder, so that nobody takes it for a whole one, and nothing of it
    is lost; returns its new path, None where that cannot be done."""
    kept = aside(path)
    try:
        return path.rename(kept)
    except OSError:
        return None


def aside(path: Path) -> Path:
    """A name beside `path` for what is damaged, which nothing has."""
    kept, number = path.with_name(f"{path.name}{DAMAGED}"), 1
    while os.path.lexists(kept):
        number += 1
        kept = path.with_name(f"{path.name}{DAMAGED}-{number}")
    return kept


def named(error: OSError, path: Path) -> OSError:
    """`error` with the name of the file that was written, which a failed write does not know."""
    return OSError(error.errno, error.strerror or str(error), str(path))
