"""Make private temporary folders for the launcher's processes, and clean up after killed ones.

No other user can look into such a folder or change anything below it. Ray, which opens its folders
to everybody on the machine, gets one inside. Ray puts UNIX sockets there, whose paths the kernel
limits to 107 bytes, so the folder's own path is short. A lock on the folder is held for as long as
the driver or the head lives; the kernel releases it however they end, so a folder that can be
locked has no owner.

A folder in shared memory stays from one session of a process to the next: workers keep there what
those that take their places are to find. A link in each session's own folder leads to it.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import resource
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.base import exposed
from launcher.cluster.errors import ClusterError
from launcher.cluster.ray import ray_compat
from launcher.cluster.ray.head import RAY_FOLDER, TOKEN_VARIABLE

_PREFIX = "launcher-"
_TOKEN, _MEMORY = "token", "memory"
_KILL_SECONDS = 10
_SOCKET_LIMIT = 107
_LONGEST_SOCKET = f"/launcher-xxxxxxxx/{RAY_FOLDER}/{ray_compat.LONGEST_SOCKET}"
_STARTING_SECONDS = 60  # a younger folder may not have been locked yet
STORE_BYTES = 256 * 2**20  # of Ray's object store, at least: for batches and results
_MOST_STORE_BYTES = 16 * 2**30  # for the gradients that parameter servers sum
_SHARED = Path("/dev/shm")
_LEAST_FILES, _WANTED_FILES = 256, 65536  # of the busiest of Ray's own processes
_LEAST_INODES, _LEAST_BYTES = 500, 32 * 2**20  # for Ray's session files and logs


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

    def link(self, memory: Path) -> None:
        """Have the workers of this folder's Ray find `memory`, by `memory_folder`."""
        (self.path / _MEMORY).symlink_to(memory)

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
    check_files()
    check_shared_memory()
    check_disk(base)
    return _create(base)


@functools.cache
def shared_memory() -> Scratch | None:
    """Make the folder in shared memory for all sessions of this process; None if there can be none.

    It is deleted when the process exits; by `head` if the process is killed; else by a next start.
    """
    if not os.access(_SHARED, os.W_OK | os.X_OK) or exposed(_SHARED) is not None:
        return None
    atexit.register(remove_shared_memory)
    return _create(_SHARED)


def remove_shared_memory() -> None:
    """Delete that folder, if there is one: for an exit that calls nothing of `atexit`."""
    if shared_memory.cache_info().currsize and (made := shared_memory()) is not None:
        made.remove()


def memory_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder in shared memory that a worker of these variables has; None without one."""
    link = Path(environ.get(TOKEN_VARIABLE, os.devnull)).with_name(_MEMORY)
    return link.resolve() if link.is_dir() else None


def _create(base: Path) -> Scratch:
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
    putting a folder of theirs in its place.

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


# -- Resources without which Ray fails minutes later, with a message about something else ----------


def check_files() -> None:
    """Raise this process's limit of open files up to its hard limit; child processes inherit it.

    Raises:
        ClusterError: the limit is too low for Ray.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if most < _LEAST_FILES:
        raise ClusterError(
            f"A process may open only {most} files here, and Ray needs {_LEAST_FILES}: raise the "
            "limit (ulimit -n, or LimitNOFILE= of a service)."
        )
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_shared_memory(folder: Path = _SHARED) -> None:
    """Check that processes can share as much memory as Ray needs.

    Raises:
        ClusterError: they cannot.
    """
    if not folder.is_dir():  # Ray uses another folder
        return
    if not os.access(folder, os.W_OK):
        raise ClusterError(
            f"{folder} cannot be written, and Ray's processes share memory there: mount it "
            f"writable (docker run --shm-size={STORE_BYTES >> 20}m)."
        )


def store_bytes(folder: Path = _SHARED) -> int:
    """Return the size of Ray's object store: up to half of the memory that can be shared.

    Memory is taken when it is written, and what is freed is written again, so a large store costs
    nothing where little lies in it.
    """
    if not folder.is_dir():
        return STORE_BYTES
    disk = os.statvfs(folder)
    return max(STORE_BYTES, min(disk.f_bavail * disk.f_frsize // 2, _MOST_STORE_BYTES))


def check_disk(folder: Path) -> None:
    """Check that the disk of `folder` has room for Ray's files.

    Raises:
        ClusterError: it is full.
    """
    disk = os.statvfs(folder)
    if disk.f_files and disk.f_favail < _LEAST_INODES:
        raise ClusterError(
            f"{folder} has room for only {disk.f_favail} more files (df -i {folder}), and Ray "
            f"needs {_LEAST_INODES}: delete some, or set TMPDIR to a short folder of another disk."
        )
    if disk.f_bavail * disk.f_frsize < _LEAST_BYTES:
        raise ClusterError(
            f"{folder} is full (df {folder}), and Ray needs {_LEAST_BYTES >> 20} MiB there: make "
            "room, or set TMPDIR to a short folder of another disk."
        )
