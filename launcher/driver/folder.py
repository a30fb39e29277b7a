"""The run folder `<run.dir>/<run.id>/`: who owns it, what is in it, and its lock.

`check` only looks, so that a wrong setting fails fast and leaves nothing behind. `claim` makes the
folder and locks it, so that no two runs share one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from launcher.cluster.slurm.attempts import attempt_folder
from launcher.config.errors import ConfigError
from launcher.config.schema import Config, Run
from launcher.driver.folder_handle import FolderHandle, open_handle
from launcher.driver.identity import check_same_run
from launcher.driver.private_files import OTHERS, is_own, private_files
from launcher.files import FULL, clear_partial, exposed, named, open_own, say_aside
from launcher.train import checkpoint

LOCK = ".lock"
_OF_THE_DISK = FULL | {errno.EIO}  # errors of the disk, not of a setting


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
        made: the folders that this process made for it, innermost first; empty if it existed.
    """

    path: Path
    finished_steps: int = 0
    attempt: int | None = None
    damaged: tuple[str, ...] = ()
    next_batch: int = 0
    handle: FolderHandle | None = None
    made: tuple[Path, ...] = ()

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


def new_id(model_name: str) -> str:
    """Return a new run id: `<model>-<utc yyyymmdd-hhmmss>-<4 hex digits>`."""
    return f"{model_name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def check(config: Config, thorough: bool = True) -> int:
    """Return how many finished steps the run would resume from; 0 for a fresh start.

    Args:
        config: checked settings.
        thorough: whether to read all files of the checkpoint of a run that is complete. For other
            runs `claim` does that.

    Raises:
        ConfigError: `run.dir` cannot hold a run, or `run.id` and `run.resume` do not fit what is on
            disk.
        OSError: the disk is full or broken.
    """
    _check_place(config.run)
    _check_exposed(config)
    if config.run.id is None:
        return 0
    path = Path(config.run.dir, config.run.id)
    if path.exists() and not path.is_dir():
        raise _no_folder(path)
    if config.run.resume == "never" and path.exists():
        raise _taken(path)
    if path.exists():
        _check_owner(config.run, path)
    step = _choose(config, path, thorough=False).step or 0
    if thorough and step >= config.train.steps:
        step = _choose(config, path).step or 0
    return step


def _check_place(run: Run) -> None:
    """Check that the run's folder exists or can be made, by making a folder there for a moment.

    For root, the permissions say nothing: /proc, for one, looks writable and is not.
    """
    parent = run.dir
    path = Path(parent).absolute()
    try:
        (path / (run.id or "")).exists()
    except OSError as error:  # such as a name that is too long or a folder without access
        raise _not_writable(parent, f"{error.filename}: {error.strerror}") from None
    there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not there.is_dir():
        raise _not_writable(parent, f"{there} is not a folder")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".launcher-", dir=there))
    except OSError as error:
        if error.errno in _OF_THE_DISK:
            raise named(error, there) from None
        raise _not_writable(parent, f"you may not write to {there}") from None


def _check_exposed(config: Config) -> None:
    """Check that nobody can put a batch script of theirs in the place of a private run's.

    Slurm would run it as this user. A run by itself takes no code from its folder, and checks the
    owner.
    """
    run = config.run
    if run.shared or config.task != "submit":
        return
    path = Path(run.dir).absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if (folder := exposed(there.resolve(), trust_group=True)) is not None:
        raise ConfigError(
            f"run.dir={run.dir} cannot hold a private job: anybody may rename what is in {folder}",
            f"Run 'chmod o-w {folder}', choose another run.dir, or set run.shared=true.",
            ["run.dir"],
        )


def _check_owner(run: Run, path: Path) -> None:
    if not run.shared and not is_own(path):
        raise _of_another_user(path)


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
    path = make(config)
    made = (path, *missing) if fresh else ()
    with (
        private_files(config.run),
        open(open_own(path / LOCK, os.O_WRONLY), "ab") as lock,
        open_handle(path) as handle,
    ):
        _lock(lock, path)
        for written in (path, path / "plots"):
            clear_partial(written)
        # `check` has looked already, but only now can nobody else be writing.
        yield reload(RunFolder(path, handle=handle, made=made), config)


@contextmanager
def unmade(made: Sequence[Path], on: type[BaseException] = BaseException) -> Iterator[None]:
    """Delete folders that were just made if the context raises `on`.

    Args:
        made: the folders, innermost first. The first is deleted with its contents, the others only
            if they are empty.
        on: the exceptions that mean that what they were made for did not begin.
    """
    try:
        yield
    except on:
        if made:
            shutil.rmtree(made[0], ignore_errors=True)
            with suppress(OSError):  # not empty any more
                for folder in made[1:]:
                    folder.rmdir()
        raise


def reload(home: RunFolder, config: Config) -> RunFolder:
    """Return a claimed folder with what is its newest intact checkpoint now.

    Call it while no worker writes: like `claim` it renames damaged checkpoints and deletes partial
    ones.

    Raises:
        LostFolderError: the folder was deleted or renamed.
        ConfigError: like `check`.
    """
    home.check()
    choice = _choose(config, home.path)
    checkpoint.clear_partial(home.checkpoints)
    damaged = tuple(_set_aside(home.checkpoints, *each) for each in choice.damaged)
    next_batch = choice.account.next_batch if choice.account else 0
    step = choice.step or 0
    return replace(home, finished_steps=step, damaged=damaged, next_batch=next_batch)


def make(config: Config) -> Path:
    """Make the run's folder, or return the existing one; raise like `claim`.

    Its user alone may look into it, unless the run is shared.
    """
    run = config.run
    try:
        Path(run.dir).mkdir(parents=True, exist_ok=True)  # may hold shared runs, too
        _check_exposed(config)
        if run.id is None:
            return _fresh_folder(run, config.model.name)
        return _own_folder(run, run.id)
    except OSError as error:
        if error.errno in _OF_THE_DISK:
            raise
        raise _not_writable(run.dir, f"{error.filename}: {error.strerror}") from None


def _fresh_folder(run: Run, model_name: str) -> Path:
    while True:
        try:
            path = Path(run.dir, new_id(model_name))
            path.mkdir(_mode(run))
            return path
        except FileExistsError:
            continue  # a run of the same second drew the same digits


def _own_folder(run: Run, run_id: str) -> Path:
    path = Path(run.dir, run_id)
    try:
        path.mkdir(_mode(run), exist_ok=run.resume != "never")
    except FileExistsError:
        if not path.is_dir():
            raise _no_folder(path) from None
        raise _taken(path) from None
    _check_owner(run, path)
    if not run.shared and (mode := stat.S_IMODE(path.stat().st_mode)) & OTHERS:
        try:
            path.chmod(mode & ~OTHERS)
        except PermissionError:
            raise _of_another_user(path) from None
    return path


def _mode(run: Run) -> int:
    return 0o777 if run.shared else 0o777 & ~OTHERS


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


def _choose(config: Config, path: Path, thorough: bool = True) -> checkpoint.Choice:
    """Return the checkpoint that the run resumes from, if there is one."""
    checkpoints = RunFolder(path).checkpoints
    try:
        choice = checkpoint.newest(checkpoints, thorough, path.name)
    except OSError as error:
        raise ConfigError(
            f"run.id={path.name} cannot go on: {error.filename} cannot be read ({error.strerror})",
            "Make it readable, or choose another run.id.",
            ["run.id"],
        ) from None
    if choice.step is not None and choice.account is not None:
        check_same_run(path, choice.step, choice.account, config)
    elif choice.damaged:
        step, problem = choice.damaged[0]
        raise ConfigError(
            f"run.id={path.name} cannot go on: no checkpoint in {checkpoints} is whole "
            f"(in {step}, {problem})",
            "Put back a copy of one, or choose another run.id; to start afresh, remove them all.",
            ["run.id"],
        )
    elif config.run.resume == "must":
        raise ConfigError(
            f"run.resume=must finds nothing to go on from: {checkpoints} holds no checkpoint",
            "Check run.id and run.dir, or use run.resume=auto.",
            ["run.resume", "run.id"],
        )
    return choice


def _set_aside(checkpoints: Path, step: int, problem: str) -> str:
    """Rename a damaged checkpoint; return the line that says so."""
    lines: list[str] = []
    say_aside(checkpoints / str(step), problem, lines.append)
    return f"checkpoint {lines[0]}"


def _not_writable(parent: str, reason: str) -> ConfigError:
    return ConfigError(
        f"run.dir={parent} cannot hold a run: {reason}",
        "Set run.dir to a folder that you can write.",
        ["run.dir"],
    )


def _no_folder(path: Path) -> ConfigError:
    return ConfigError(
        f"run.id={path.name} cannot have a folder: {path} is a file",
        "Choose another run.id, or move the file away.",
        ["run.id"],
    )


def _of_another_user(path: Path) -> ConfigError:
    return ConfigError(
        f"run.id={path.name} cannot be private: {path} belongs to another user",
        "Choose another run.id, or set run.shared=true.",
        ["run.id"],
    )


def _taken(path: Path) -> ConfigError:
    return ConfigError(
        f"run.id={path.name} is taken: {path} exists, and run.resume=never",
        "Choose another run.id, or use run.resume=auto to go on with that run.",
        ["run.id", "run.resume"],
    )
