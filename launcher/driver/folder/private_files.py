"""Permissions of a run's files: its user alone may read them, unless `run.shared` is set."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.config.sections import Run

OTHERS = 0o077  # permissions of the group and of others


@contextmanager
def private_files(run: Run) -> Iterator[None]:
    """Make new files private within the context, unless the run is shared.

    It sets the umask, so it holds for every library and for child processes.
    """
    before = os.umask(OTHERS)
    try:
        if run.shared:
            os.umask(before)
        yield
    finally:
        os.umask(before)


def is_own(folder: Path) -> bool:
    """Return whether a folder, and a link that stands for it, belong to this user.

    The user is compared by the number that the file system itself assigns: on NFS, root may be
    another user.
    """
    owners = {folder.stat().st_uid, folder.lstat().st_uid}
    if owners == {os.getuid()}:
        return True
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent) as probe:
            return owners == {os.stat(probe).st_uid}
    except OSError:  # this user cannot write there
        return False
