"""A bounded cache on disk of blocks of remote files, shared by the processes of a host.

A block is a file that ends in a digest of itself, so one that is damaged or half written is never
taken. The least recently used one is deleted first. The cache only saves time: where its disk is
full or fails, a process says so once and reads all from afar.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from launcher.base import DamagedError, make_private, read_bytes, warn_once, write_whole

_LEDGER = "ledger"  # the bytes of all blocks, and the lock of those who write them
_DIGEST = 16  # bytes
_PARTIAL = ".partial"
_ROOM = 0.1  # of the bound, which is freed at once: looking at all files takes long

_log = logging.getLogger(__name__)


class BlockCache:
    """Keeps blocks by their names.

    Args:
        folder: where they are; it is made, for this user alone.
        most: the bytes of all blocks, over all processes; 0: there is no cache.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most

    def get(self, name: str) -> bytes | None:
        """Return a block; None if it is not there, or damaged."""
        path = self._folder / name
        if not self._most:
            return None
        try:
            content = read_bytes(path)
            now = time.time_ns()
            os.utime(path, ns=(now, now))
        except (OSError, DamagedError):
            return None
        block, digest = content[:-_DIGEST], content[-_DIGEST:]
        return block if xxhash.xxh3_128_digest(block) == digest else None

    def put(self, name: str, block: bytes) -> None:
        """Keep a block, whole or not at all; others may have to go for it."""
        size = len(block) + _DIGEST
        if size > self._most:
            return
        try:
            with self._ledger() as ledger:
                total = _noted(ledger)
                if total is None or total + size > self._most:
                    total = self._evict(self._most - size)
                # First: one who is killed may leave too high a figure, and no block without one.
                os.pwrite(ledger, b"%20d" % (total + size), 0)
                content = block + xxhash.xxh3_128_digest(block)
                write_whole(self._folder / name, content, private=True, durable=False)
        except OSError as error:
            why = error.strerror or error
            warn_once(_log, f"{self._folder} keeps no more of remote files ({why})")

    @contextmanager
    def _ledger(self) -> Iterator[int]:
        """Open and lock the ledger; the folder is this user's alone."""
        make_private(self._folder)
        status = self._folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise OSError(f"it is open to other users; chmod 700 {self._folder}")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        ledger = os.open(self._folder / _LEDGER, flags, 0o600)
        try:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            yield ledger
        finally:
            os.close(ledger)

    def _evict(self, most: int) -> int:
        """Delete blocks until `most` bytes are left, and a tenth more; return those that are."""
        blocks = []
        for entry in os.scandir(self._folder):
            if entry.name.endswith(_PARTIAL):  # of one who was killed: writers hold the lock
                os.unlink(entry)
            elif entry.name != _LEDGER:
                status = entry.stat(follow_symlinks=False)
                blocks.append((status.st_mtime_ns, status.st_size, entry.path))
        total = sum(size for _, size, _ in blocks)
        if total <= most:
            return total
        for _, size, path in sorted(blocks):
            os.unlink(path)
            total -= size
            if total <= most - int(_ROOM * self._most):
                break
        return total


def _noted(ledger: int) -> int | None:
    try:
        return int(os.pread(ledger, 20, 0))
    except ValueError:  # new, or damaged
        return None
