"""Who may read what a run leaves: its user alone, unless `run.shared` says otherwise.

`launcher.driver.folder` and `launcher.submit.job` use it, and `slurm_agent` on a job's other nodes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.config.schema import Run

OTHERS = 0o077  # the permissions that are not the user's own


@contextmanager
def private_files(run: Run) -> Iterator[None]:
    """Inside, what this process and those that it starts make is their user's alone, whichever
    library makes it; of a shared run it is as the user's umask says."""
    before = os.umask(OTHERS)
    try:
        if run.shared:
            os.umask(before)
        yield
    finally:
        os.umask(before)


def is_own(folder: Path) -> bool:
    """Whether a folder, and the link that may stand for it, are this user's, by whatever number the
    file system knows the user: on NFS root may be another one."""
    owners = {folder.stat().st_uid, folder.lstat().st_uid}
    if owners == {os.getuid()}:
        return True
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent) as probe:
            return owners == {os.stat(probe).st_uid}
    except OSError:  # nothing can be made there by this user
        return False
