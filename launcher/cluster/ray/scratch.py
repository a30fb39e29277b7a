"""Private temporary folders of the launcher's processes, and clean-up after killed ones.

No other user can look into such a folder or change anything below it. Ray, which opens its folders
to everybody on the machine, gets one inside. Ray puts UNIX sockets there, whose paths the kernel
limits to 107 bytes, so the folder's own path is short. A lock on the folder is held for as long as
the driver or the head lives; the kernel releases it however they end, so a folder that can be
locked has no owner.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.base.files import exposed
from launcher.cluster.errors import ClusterError
from launcher.cluster.ray import ray_compat, room
from launcher.cluster.ray.head import RAY_FOLDER, TOKEN_VARIABLE

_PREFIX = "launcher-"
_TOKEN = "token"
_KILL_SECONDS = 10
_SOCKET_LIMIT = 107
_LONGEST_SOCKET = f"/launcher-xxxxxxxx/{RAY_FOLDER}/{ray_compat.LONGEST_SOCKET}"
_STARTING_SECONDS = 60  # a younger folder may not have been locked yet


@dataclass(frozen=True)
class Scratch:
    """A private folder (mode 0700).

    Attributes:
        path: the folder.
        lock: the descriptor that holds its lock.
    """

    path: Path
    lock: int

    def token(self, secret: str) -> Path:
        """Write `secret`, which opens Ray, to a file for this user alone; return its path."""
        token = self.path / _TOKEN
        token.touch(0o600)
        token.write_text(secret)
        return token

    def remove(self) -> None:
        """Delete the folder and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def create() -> Scratch:
    """Make a scratch folder, after deleting those that killed runs of this user left beside it.

    Raises:
        ClusterError: there is no folder for temporary files that is short enough, writable and safe
            from other users; or this machine lacks the resources that Ray needs.
    """
    base = choose_base((_temporary(), "/tmp"))
    room.check_files()
    room.check_shared_memory()
    room.check_disk(base)
    sweep(base)
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    lock = os.open(path / "lock", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return Scratch(path, lock)


def _temporary() -> str:
    """Return TMPDIR or its default, also if the disk is full: that is not the wrong folder."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # none of the usual folders can be written
        return os.environ.get("TMPDIR", "/tmp")


def choose_base(candidates: Sequence[str]) -> Path:
    """Return the first of `candidates` in which scratch folders can be made.

    It has to be writable, leave room for the names of Ray's sockets, and keep other users from
    putting a folder of theirs in the place of ours.

    Raises:
        ClusterError: none of them is such a folder.
    """
    most = _SOCKET_LIMIT - len(_LONGEST_SOCKET)
    for base in (Path(candidate).resolve() for candidate in candidates):
        plain = str(base).isascii() and len(str(base)) <= most  # Ray takes no other paths
        fits = plain and os.access(base, os.W_OK | os.X_OK)
        if fits and exposed(base) is None:
            return base
    raise ClusterError(
        f"No folder for Ray's sockets: tried {', '.join(dict.fromkeys(candidates))}. Set TMPDIR to "
        f"a writable folder on this machine whose path has at most {most} characters, all of them "
        "ASCII, and in which other users cannot rename your files (mode 0700, or 1777 as /tmp has)."
    )


def end_users(folder: Path) -> None:
    """Kill the processes started with the secret in `folder`, also stopped ones, and wait."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's, or gone
            if process.environ().get(TOKEN_VARIABLE) == str(folder / _TOKEN):
                process.kill()
                found.append(process)
    psutil.wait_procs(found, _KILL_SECONDS)


def sweep(base: Path) -> None:
    """Delete this user's scratch folders below `base` whose owners have ended."""
    for path in base.glob(f"{_PREFIX}{'?' * 8}"):
        with suppress(OSError):  # another run may sweep the same folder
            status = path.lstat()
            mine = status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode)
            if not mine or time.time() - status.st_mtime < _STARTING_SECONDS:
                continue
            try:
                lock = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:  # killed before it had one, so there is nothing in it
                path.rmdir()
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                end_users(path)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
