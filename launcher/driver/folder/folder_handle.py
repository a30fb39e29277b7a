"""An open run folder, which is recognised even if somebody renames or deletes it.

Files written by the old path would be lost, or end up in another folder without the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class LostFolderError(OSError):
    """The run's folder was deleted or renamed during training; the text is one line."""


@dataclass(frozen=True)
class FolderHandle:
    """A folder that this process holds open.

    Attributes:
        path: the path that it was opened by.
        descriptor: its file descriptor.
    """

    path: Path
    descriptor: int

    def check(self) -> None:
        """Check that `path` still leads to the folder.

        Raises:
            LostFolderError: it does not.
        """
        if self._is_at(self.path):
            return
        if (now := self.current_path()) is not None:
            raise LostFolderError(
                f"the run folder {self.path} was renamed to {now} while the run trained: the run "
                "ends. Rename it back to resume from its newest checkpoint."
            )
        raise LostFolderError(
            f"the run folder {self.path} was deleted while the run trained: the run ends, and its "
            "checkpoints are lost."
        )

    def current_path(self) -> Path | None:
        """Return the folder's present path, or None if it is deleted or its path is not known."""
        try:  # Linux only, and only for local folders
            for path in (self.path, Path(os.readlink(f"/proc/self/fd/{self.descriptor}"))):
                if self._is_at(path):
                    return path
        except OSError:
            pass
        return None

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(self.descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a file system that fails now: assume nothing has changed
            return True


@contextmanager
def open_handle(path: Path) -> Iterator[FolderHandle]:
    """Hold a folder open for the duration of the context.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield FolderHandle(path.absolute(), descriptor)
    finally:
        os.close(descriptor)
