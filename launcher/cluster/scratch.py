"""A session's own short temporary folder, and the sweeping of those that a killed run left.

Ray puts UNIX sockets below it, whose paths the kernel limits to 107 bytes. A lock on the folder is
held for as long as the driver or the head lives; the kernel drops it however they end, so a folder
that can be locked has no owner. `session` and `slurm_agent` import it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.cluster.errors import ClusterError

_PREFIX = "launcher-"
_SOCKET_LIMIT = 107
_LONGEST_SOCKET = (
    "/launcher-xxxxxxxx/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
)
_STARTING_SECONDS = 60  # younger than this, a folder may not have been locked yet


@dataclass(frozen=True)
class Scratch:
    """A private folder (mode 0700) and the descriptor that holds its lock."""

    path: Path
    lock: int

    def token(self, secret: str) -> Path:
        """The file that holds `secret`, which opens Ray, for this user alone."""
        token = self.path / "token"
        token.touch(0o600)
        token.write_text(secret)
        return token

    def remove(self) -> None:
        """Delete the folder and let go of the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def create() -> Scratch:
    """A fresh scratch folder, after sweeping what dead runs of this user left beside it.

    Raises:
        ClusterError: there is no folder for temporary files that is short enough and writable.
    """
    base = choose_base((tempfile.gettempdir(), "/tmp"))
    sweep(base)
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return Scratch(path, lock)


def choose_base(candidates: Sequence[str]) -> Path:
    """The first of `candidates` that can be written and leaves room for Ray's socket names."""
    room = _SOCKET_LIMIT - len(_LONGEST_SOCKET)
    for base in candidates:
        if len(os.fsencode(base)) <= room and os.access(base, os.W_OK | os.X_OK):
            return Path(base)
    raise ClusterError(
        f"No folder for Ray's sockets: tried {', '.join(dict.fromkeys(candidates))}. "
        f"Set TMPDIR to a writable folder on this machine whose path has at most {room} characters."
    )


def sweep(base: Path) -> None:
    """Delete this user's scratch folders below `base` that no living process holds."""
    for path in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another run may sweep the same folder
            status = path.lstat()
            mine = status.st_uid == os.getuid() and path.is_dir() and not path.is_symlink()
            if not mine or time.time() - status.st_mtime < _STARTING_SECONDS:
                continue
            lock = os.open(path / "lock", os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
