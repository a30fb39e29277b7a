"""Writing a run's files so that a reader never meets half of one, and a full disk has a name.

`summary`, `jsonl` and `launcher.train` use it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # what may pass: space can be freed


def write_whole(path: Path, text: str, private: bool = False) -> None:
    """Write a text file whole or not at all; a `private` one only its owner may read. Raises
    OSError with the file's name."""
    partial = path.with_suffix(".partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise named(error, path) from None


def named(error: OSError, path: Path) -> OSError:
    """`error` with the name of the file that was written, which a failed write does not know."""
    return OSError(error.errno, error.strerror or str(error), str(path))
