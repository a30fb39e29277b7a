"""A run's folder while the run has it: by its path and by the folder itself, which may part.

Somebody may delete or rename it while the run trains; what is written by the path would then be
lost, or stand in another folder without the rest. `folder` makes a `Held`, `training` asks it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class LostFolderError(OSError):
    """The run's folder was deleted or renamed while the run trained: what follows, in a line."""


@dataclass(frozen=True)
class Held:
    """A folder that this process has opened, as `descriptor`, by `path`."""

    path: Path
    descriptor: int

    def check(self) -> None:
        """Raises LostFolderError where the path no longer leads to the folder."""
        if self._is_at(self.path):
            return
        if (now := self.found()) is not None:
            raise LostFolderError(
                f"the run folder {self.path} was renamed to {now} while the run trained: the run "
                "ends. Rename it back to go on from its newest checkpoint."
            )
        raise LostFolderError(
            f"the run folder {self.path} was deleted while the run trained: the run ends, and its "
            "checkpoints are lost."
        )

    def found(self) -> Path | None:
        """Where the folder is by now; None where it is no longer anywhere."""
        try:  # Linux knows, of folders on this machine
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
        except OSError:  # a file system that does not answer now says nothing of it
            return True


@contextmanager
def hold(path: Path) -> Iterator[Held]:
    """Open a folder for as long as the context lasts. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Held(path.absolute(), descriptor)
    finally:
        os.close(descriptor)
