"""Who may read what a run leaves: its user alone, unless `run.shared` says otherwise.

`launcher.train.folder` and `launcher.submit` use it, and `slurm_agent` on a job's other nodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

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
