"""A bounded cache on disk of blocks of remote files, shared by the processes of a host.

Blocks lie in folders by their names; each folder has an equal share of the bound, and loses what
was least recently used. A block is a file that ends in a digest of itself, so one that is damaged
or half written is never taken. The cache only saves time: where its disk is full or fails, a
process says so once and reads all from afar.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from launcher.base import DamagedError, exposed, make_private, read_bytes, warn_once, write_whole

_FOLDERS = 16**2
_DIGEST = 16  # bytes

_log = logging.getLogger(__name__)


class BlockCache:
    """Keeps blocks by their names, which are hexadecimal digests.

    Args:
        folder: where they are; it is made, for this user alone.
        most: the bytes of all blocks, over all processes; a block has 1/256 of them at most.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._share = folder, most // _FOLDERS

    def get(self, name: str) -> bytes | None:
        """Return a block; None if it is not there, or damaged."""
        if not self._share:
            return None
        try:
            path = self._root / name[:2] / name
            content = read_bytes(path)
            os.utime(path)
        except (OSError, DamagedError):
            return None
        block, digest = content[:-_DIGEST], content[-_DIGEST:]
        return block if xxhash.xxh3_128_digest(block) == digest else None

    def put(self, name: str, block: bytes) -> None:
        """Keep a block, whole or not at all; others may have to go for it."""
        content = block + xxhash.xxh3_128_digest(block)
        left = self._share - len(content)
        if left < 0:
            return
        try:
            folder = self._root / name[:2]
            make_private(folder)
            with _locked(folder):
                found = ((entry.stat(follow_symlinks=False), entry) for entry in os.scandir(folder))
                for status, entry in sorted(found, key=lambda one: -one[0].st_mtime_ns):
                    left -= status.st_size
                    if left < 0:
                        os.unlink(entry)
                write_whole(folder / name, content, private=True, durable=False)
        except OSError as error:
            why = error.strerror or error
            warn_once(_log, f"{self._folder} keeps no more of remote files ({why})")

    @functools.cached_property
    def _root(self) -> Path:
        """The folder; raises OSError if it cannot be used."""
        make_private(self._folder)
        if at := exposed(self._folder.resolve(), trust_group=True):
            raise OSError(f"others may write to {at}")
        return self._folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
