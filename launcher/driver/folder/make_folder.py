"""Make the folder `<run.dir>/<run.id>/`, or check beforehand that it can be made or used.

The user alone may read its files, unless `run.shared` is set.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from launcher.base import FULL, exposed, named, to_type
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.config.sections import Run

_OF_THE_DISK = FULL | {errno.EIO}  # errors of the disk, not of a setting
OTHERS = 0o077  # permissions of the group and of others


def new_id(model_name: str) -> str:
    """Return a new run id: `<model>-<utc yyyymmdd-hhmmss>-<4 hex digits>`."""
    return f"{model_name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def check_folder(config: Config) -> Path | None:
    """Check that the run's folder can be made or used.

    Returns:
        Its path, whether it exists or not; None if the run has no id yet.

    Raises:
        ConfigError: `run.dir` cannot hold a run, or `run.id` and `run.resume` do not fit what is on
            disk.
        OSError: the disk is full or broken.
    """
    _check_place(config.run)
    _check_exposed(config)
    if config.run.id is None:
        return None
    path = Path(config.run.dir, config.run.id)
    if path.exists():
        _check_existing(config.run, path)
    return path


def make_folder(config: Config) -> Path:
    """Make the run's folder, or return the existing one.

    Only its user may look into it, unless the run is shared. Raises like `check_folder`.
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
        path.mkdir(_mode(run))
    except FileExistsError:
        _check_existing(run, path)
    if not run.shared and (mode := stat.S_IMODE(path.stat().st_mode)) & OTHERS:
        try:
            path.chmod(mode & ~OTHERS)
        except PermissionError:
            raise _of_another_user(path) from None
    return path


def _mode(run: Run) -> int:
    return 0o777 if run.shared else 0o777 & ~OTHERS


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
            "Choose another run.dir, set run.shared=true, or run: "
            f"{to_type('chmod', 'o-w', str(folder))}",
        )


def _check_existing(run: Run, path: Path) -> None:
    """Check that the run may use what is at `path`."""
    key = f"run.id={path.name}"
    if not path.is_dir():
        raise ConfigError(
            f"{key} cannot have a folder: {path} is a file",
            "Choose another run.id, or move the file away.",
        )
    if run.resume == "never":
        raise ConfigError(
            f"{key} is taken: {path} exists, and run.resume=never",
            "Choose another run.id, or use run.resume=auto to resume that run.",
        )
    if not run.shared and not is_own(path):
        raise _of_another_user(path)


def _not_writable(parent: str, reason: str) -> ConfigError:
    return ConfigError(
        f"run.dir={parent} cannot hold a run: {reason}",
        "Set run.dir to a folder that you can write.",
    )


def _of_another_user(path: Path) -> ConfigError:
    return ConfigError(
        f"run.id={path.name} cannot be private: {path} belongs to another user",
        "Choose another run.id, or set run.shared=true.",
    )


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
