"""The run folder `<run.dir>/<run.id>/`: its owner, its content, its lock, and its open handle.

`check` only looks, so that a wrong setting fails fast and leaves nothing behind. `claim` makes the
folder and locks it, so that no two runs share one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from launcher import checkpoint
from launcher.base import clear_partial, open_own, set_aside
from launcher.cluster.slurm.allocation import attempt_folder
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.driver.folder.identity import check_same_run
from launcher.driver.folder.make_folder import check_folder, make_folder
from launcher.driver.folder.private_files import private_files
from launcher.driver.folder.status import Status

LOCK = ".lock"


@dataclass(frozen=True)
class RunFolder:
    """A run's folder and its newest checkpoint.

    Attributes:
        path: the folder.
        finished_steps: the step of its newest intact checkpoint; 0 if there is none.
        attempt: the number of this start of a Slurm job's run, which has logs of its own.
        damaged: a line for each newer checkpoint that is damaged.
        next_batch: the index of the next batch, as that checkpoint says.
        handle: the open folder, while this process has claimed it.
        created: the folders that this process made for it, innermost first; empty if it existed.
        status: shows the state of the run, while it trains.
    """

    path: Path
    finished_steps: int = 0
    attempt: int | None = None
    damaged: tuple[str, ...] = ()
    next_batch: int = 0
    handle: FolderHandle | None = None
    created: tuple[Path, ...] = ()
    status: Status | None = None

    @property
    def id(self) -> str:
        """The run's id, which is the folder's name."""
        return self.path.name

    def check(self) -> None:
        """Check that the folder is still where it was.

        Raises:
            LostFolderError: it was deleted or renamed.
        """
        if self.handle is not None:
            self.handle.check()

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """The folder of logs: of the run, or of this attempt in a Slurm job."""
        if self.attempt is not None:
            return attempt_folder(self.path, self.attempt)
        return self.path / "logs"


def check(config: Config, thorough: bool = True) -> int:
    """Return how many finished steps the run would resume from; 0 for a fresh start.

    Args:
        config: checked settings.
        thorough: whether to read all files of the checkpoint of a run that is complete. For other
            runs `claim` does that.

    Raises:
        ConfigError: like `check_folder`, or there is no checkpoint that the run can resume from.
        OSError: the disk is full or broken.
    """
    path = check_folder(config)
    if path is None:
        return 0
    step = _choose(config, path, thorough=False).step or 0
    if thorough and step >= config.train.steps:
        step = _choose(config, path).step or 0
    return step


@contextmanager
def claim(config: Config) -> Iterator[RunFolder]:
    """Make or open the run's folder and lock it against other processes.

    Within the context all new files are private, unless the run is shared. A damaged checkpoint is
    renamed, and the remains of interrupted saves and writes are deleted.

    Yields:
        The folder, with its newest intact checkpoint.

    Raises:
        ConfigError: like `check`, or another process has claimed the folder.
        OSError: the disk is full or broken.
    """
    base = Path(config.run.dir)
    missing = [folder for folder in (base, *base.parents) if not folder.exists()]
    fresh = config.run.id is None or not Path(base, config.run.id).exists()
    path = make_folder(config)
    created = (path, *missing) if fresh else ()
    with (
        private_files(config.run),
        open(open_own(path / LOCK, os.O_WRONLY), "ab") as lock,
        open_handle(path) as handle,
    ):
        _lock(lock, path)
        for written in (path, path / "plots"):
            clear_partial(written)
        # `check` has looked already, but only now can nobody else be writing.
        yield reload(RunFolder(path, handle=handle, created=created), config)


@contextmanager
def delete_on_error(
    created: Sequence[Path], on: type[BaseException] = BaseException
) -> Iterator[None]:
    """Delete folders that were just made if the context raises `on`.

    Args:
        created: the folders, innermost first. The first is deleted with its contents, the others
            only if they are empty.
        on: the exceptions after which they are not needed.
    """
    try:
        yield
    except on:
        if created:
            shutil.rmtree(created[0], ignore_errors=True)
            with suppress(OSError):  # not empty any more
                for folder in created[1:]:
                    folder.rmdir()
        raise


def reload(home: RunFolder, config: Config) -> RunFolder:
    """Return a claimed folder with its present newest intact checkpoint.

    Call it while no worker writes: like `claim` it renames damaged checkpoints and deletes partial
    ones.

    Raises:
        LostFolderError: the folder was deleted or renamed.
        ConfigError: like `check`.
    """
    home.check()
    choice = _choose(config, home.path)
    checkpoint.clear_partial_saves(home.checkpoints)
    damaged = tuple(_set_aside(home.checkpoints, *each) for each in choice.damaged)
    next_batch = choice.account.next_batch if choice.account else 0
    step = choice.step or 0
    return replace(home, finished_steps=step, damaged=damaged, next_batch=next_batch)


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        # The kernel releases it when the process ends, however that happens.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"run.id={path.name} is running right now, in {path}",
            "Wait for it to end, or choose another run.id.",
            ["run.id"],
        ) from None


def _choose(config: Config, path: Path, thorough: bool = True) -> checkpoint.NewestIntact:
    """Return the checkpoint that the run resumes from, if there is one."""
    checkpoints = RunFolder(path).checkpoints
    try:
        choice = checkpoint.newest(checkpoints, thorough, path.name)
    except OSError as error:
        raise ConfigError(
            f"run.id={path.name} cannot be resumed: {error.filename} cannot be read "
            f"({error.strerror})",
            "Make it readable, or choose another run.id.",
            ["run.id"],
        ) from None
    if choice.step is not None and choice.account is not None:
        check_same_run(path, choice.step, choice.account, config)
    elif choice.damaged:
        step, problem = choice.damaged[0]
        raise ConfigError(
            f"run.id={path.name} cannot be resumed: no checkpoint in {checkpoints} is intact "
            f"(in {step}, {problem})",
            "Put back a copy of one, or choose another run.id; to start afresh, remove them all.",
            ["run.id"],
        )
    elif config.run.resume == "must":
        raise ConfigError(
            f"run.resume=must finds nothing to resume from: {checkpoints} holds no checkpoint",
            "Check run.id and run.dir, or use run.resume=auto.",
            ["run.resume", "run.id"],
        )
    return choice


def _set_aside(checkpoints: Path, step: int, problem: str) -> str:
    """Rename a damaged checkpoint; return the line that says so."""
    return f"checkpoint {set_aside(checkpoints / str(step), problem)}"


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
