"""Checks that this machine has the resources that Ray needs.

Without them Ray would fail minutes later, with a message about something else.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from launcher.cluster.errors import ClusterError

STORE_BYTES = 256 * 2**20  # of Ray's object store, at least: for batches and results
_MOST_STORE_BYTES = 16 * 2**30  # for the gradients that parameter servers sum
_SHARED = Path("/dev/shm")
_LEAST_FILES, _WANTED_FILES = 256, 65536  # of the busiest of Ray's own processes
_LEAST_INODES, _LEAST_BYTES = 500, 32 * 2**20  # for Ray's session files and logs


def check_files() -> None:
    """Raise this process's limit of open files as far as allowed; child processes inherit it.

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


def check_disk(folder: Path, least_inodes: int = _LEAST_INODES) -> None:
    """Check that the disk of `folder` has room for Ray's files.

    Raises:
        ClusterError: it has not.
    """
    disk = os.statvfs(folder)
    if disk.f_files and disk.f_favail < least_inodes:
        raise ClusterError(
            f"{folder} has room for only {disk.f_favail} more files (df -i {folder}), and Ray "
            f"needs {least_inodes}: delete some, or set TMPDIR to a short folder of another disk."
        )
    if disk.f_bavail * disk.f_frsize < _LEAST_BYTES:
        raise ClusterError(
            f"{folder} is full (df {folder}), and Ray needs {_LEAST_BYTES >> 20} MiB there: make "
            "room, or set TMPDIR to a short folder of another disk."
        )
