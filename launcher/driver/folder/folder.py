"""The run folder `<run.dir>/<run.id>/`: its lock, its open handle, its settings and plan.

`check` only looks, so that a wrong setting fails fast and leaves nothing behind. `claim` makes the
folder and locks it, so that no two runs share one. A run that begins with the state of another,
`run.fork`, is given a copy of its checkpoint, and resumes from that like from one of its own.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import hmac
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher import checkpoint
from launcher.base import (
    aside,
    clear_partial,
    complain,
    missing_path,
    open_own,
    set_aside,
    write_whole,
)
from launcher.checkpoint import RunMetadata, copy_checkpoint, read_run_metadata, steps_in
from launcher.cluster.slurm.allocation import attempt_folder
from launcher.config.compose import redacted, to_dict, to_written
from launcher.config.environment import below, dotted, unresolved
from launcher.config.errors import ConfigError, shown
from launcher.config.schema import Config
from launcher.driver.folder.make_folder import check_folder, make_folder, private_files
from launcher.driver.folder.status import Status
from launcher.recipes import fingerprint_dataset, rows_taken
from launcher.report.text import flat

if TYPE_CHECKING:
    from launcher.plan import Plan  # imports JAX

LOCK = ".lock"
FORMAT = 1  # of the result of `contents`
_CHECKPOINTS = "checkpoints"
# A run with other values of these is another run. A checkpoint holds values from the environment as
# their interpolation and as a fingerprint, which shows that a value has changed but not what it is.
_FIXED = ("model", "dataset", "optimizer", "train.global_batch_size", "train.precision", "run.seed")
_FREE = ("dataset.cache_gib",)  # but for these
# Settings by which batch k depends on other rows.
_OF_DATA = ("dataset", "train.global_batch_size", "run.seed", "model.sequence_length")
# Settings that a fork does not list: they are no part of the training, or always others.
_UNLISTED = ("task", "run.id", "run.dir", "run.resume", "run.fork", "run.mirror", "sweep")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """A run's folder and its newest checkpoint.

    Attributes:
        path: the folder.
        finished_steps: the step of its newest intact checkpoint; 0 if there is none.
        attempt: the number of this start of a Slurm job's run, which has logs of its own.
        damaged: a line for each newer checkpoint that is damaged.
        next_batch: the index of the next batch, as that checkpoint says.
        taken: the rows that were taken before batch 0, by their source.
        forked_from: the checkpoint of another run that this one began with, `<folder>@<step>`.
        descriptor: of the open folder, while this process has claimed it.
        absolute: its path then, whatever the working directory becomes.
        created: the folders that this process made for it, innermost first; empty if it existed.
        status: shows the state of the run, while it trains.
    """

    path: Path
    finished_steps: int = 0
    attempt: int | None = None
    damaged: tuple[str, ...] = ()
    next_batch: int = 0
    taken: Mapping[str, int] = field(default_factory=dict)
    forked_from: str | None = None
    descriptor: int | None = None
    absolute: Path | None = None
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
        path = self.absolute or self.path.absolute()
        if self._is_at(path):
            return
        if (now := self.current_path()) is not None:
            raise LostFolderError(
                f"the run folder {path} was renamed to {now} while the run trained: the run "
                "ends. Rename it back to resume from its newest checkpoint."
            )
        raise LostFolderError(
            f"the run folder {path} was deleted while the run trained: the run ends, and its "
            "checkpoints are lost."
        )

    def current_path(self) -> Path | None:
        """Return the folder's present path, or None if it is deleted or its path is not known."""
        if self._is_at(self.absolute or self.path):
            return self.path
        try:  # Linux only, and only for local folders
            path = Path(os.readlink(f"/proc/self/fd/{self.descriptor}"))
        except OSError:
            return None
        return path if self._is_at(path) else None

    def _is_at(self, path: Path) -> bool:
        if self.descriptor is None:
            return True
        try:
            return os.path.samestat(os.stat(path), os.fstat(self.descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a file system that fails now: assume nothing has changed
            return True

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / _CHECKPOINTS

    @property
    def logs(self) -> Path:
        """The folder of logs: of the run, or of this attempt in a Slurm job."""
        if self.attempt is not None:
            return attempt_folder(self.path, self.attempt)
        return self.path / "logs"


def check(config: Config, thorough: bool = True) -> int:
    """Return how many finished steps the run would resume from; 0 for a fresh start.

    A run that is to begin with the state of another lists the settings that differ.

    Args:
        config: checked settings.
        thorough: whether to read all files of the checkpoint of a run that is complete. For other
            runs `claim` does that.

    Raises:
        ConfigError: like `check_folder`, or there is no checkpoint that the run can resume from.
        OSError: the disk is full or broken.
    """
    path = check_folder(config)
    if (parent := parent_of(config)) is not None:
        if config.train.steps <= (begins := int(parent.path.name)):
            raise ConfigError(
                f"train.steps={config.train.steps} leaves nothing to train: "
                f"run.fork={config.run.fork} begins after step {begins}",
                "Raise train.steps, the number of the last step.",
            )
        _log.info(f"a new run begins with the state of {parent.path}")
        for key, (before, now) in differences(parent.run, config).items():
            if not below(key, _UNLISTED):
                _log.info(f"  {key}: {before} -> {now}")
        return begins
    if path is None:
        return 0
    step = _choose(config, path, thorough=False).step or 0
    if thorough and step >= config.train.steps:
        step = _choose(config, path).step or 0
    return step


def pinned(config: Config) -> Config:
    """Return the settings with what their data in an object store are, for all that follows.

    A run that resumes takes those of its checkpoint, which must be there as they were.

    Raises:
        ConfigError: like `check_folder`.
        launcher.recipes.InputError: they cannot be found, or have changed.
    """

    def before() -> Mapping[str, Any]:
        run = None
        if path := check_folder(config):
            with suppress(OSError):  # `check` reports it
                run = checkpoint.newest(RunFolder(path).checkpoints, False, path.name).run
        return run.config["dataset"] if run else {}

    return replace(config, dataset=config.dataset.pinned(before))


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
        ExitStack() as stack,
    ):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        stack.enter_context(hold(lock, path))
        for written in (path, path / "plots"):
            clear_partial(written)
        home = RunFolder(path, descriptor=descriptor, absolute=path.absolute(), created=created)
        # `check` has looked already, but only now can nobody else be writing.
        with delete_on_error(created):
            named = replace(config, run=replace(config.run, id=path.name))
            if (parent := parent_of(named, thorough=True)) is not None:
                _adopt(parent, named, home)
            home = reload(home, config)
        yield home


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


def reload(home: RunFolder, config: Config, thorough: bool = True) -> RunFolder:
    """Return a claimed folder with its present newest intact checkpoint.

    Call it while no worker writes: like `claim` it renames damaged checkpoints and deletes partial
    ones. With `thorough`, it reads all of their files (`checkpoint.damage`).

    Raises:
        LostFolderError: the folder was deleted or renamed.
        ConfigError: like `check`.
    """
    home.check()
    choice = _choose(config, home.path, thorough)
    checkpoint.clear_partial_saves(home.checkpoints)
    damaged = tuple(
        f"checkpoint {set_aside(home.checkpoints / str(step), problem)}"
        for step, problem in choice.damaged
    )
    home = replace(home, finished_steps=choice.step or 0, damaged=damaged, next_batch=0)
    if (run := choice.run) is None:
        return home
    forked_from = run.config["run"].get("fork")
    return replace(home, next_batch=run.next_batch, taken=run.taken, forked_from=forked_from)


@contextmanager
def hold(file: BinaryIO, path: Path, state: str = "is running right now") -> Iterator[None]:
    """Lock a file for the run or sweep in a folder; raise ConfigError if another process has.

    Where the file system has no locks, a file that only one process can make stands in for it.
    """
    problem = f"run.id={path.name} {state}, in {path}"
    remedy = "Wait for it to end, or choose another run.id."
    with ExitStack() as stack:
        try:
            # The kernel releases it when the process ends, however that happens.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(problem, remedy) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                raise
            from filelock import SoftFileLock, Timeout

            try:
                stack.enter_context(SoftFileLock(path / ".held", timeout=0))
            except Timeout:
                remedy += f" If its process is gone, delete {path / '.held'}."
                raise ConfigError(problem, remedy) from None
        yield


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
        ) from None
    if choice.step is not None and choice.run is not None:
        check_same_run(path, choice.step, choice.run, config)
    elif choice.damaged:
        step, problem = choice.damaged[0]
        url = config.run.mirror
        begins = f"fetch the newest of {url}, if it has any" if url else "start afresh"
        raise ConfigError(
            f"run.id={path.name} cannot be resumed: no checkpoint in {checkpoints} is intact "
            f"(in {step}, {problem})",
            f"Put back a copy of one, or choose another run.id; to {begins}, remove them all.",
        )
    elif config.run.resume == "must" and config.run.mirror is None:  # else see `mirrored`
        raise ConfigError(
            f"run.resume=must finds nothing to resume from: {checkpoints} holds no checkpoint",
            "Check run.id and run.dir, or use run.resume=auto.",
        )
    return choice


class Parent(NamedTuple):
    """A checkpoint of another run, its metadata, and its settings with today's environment."""

    path: Path
    run: RunMetadata
    settings: dict[str, Any]


def parent_of(config: Config, thorough: bool = False) -> Parent | None:
    """Return what `run.fork` names; None without it, or if the run has a checkpoint of its own.

    Args:
        config: the settings.
        thorough: whether to read all files of the checkpoint.

    Raises:
        ConfigError: it names no intact checkpoint.
    """
    run = config.run
    if run.fork is None or (run.id and steps_in(Path(run.dir, run.id, _CHECKPOINTS))):
        return None
    named, _, name = run.fork.rpartition("@")
    if not named or "/" in name:
        named, name = run.fork, "latest"
    homes = [Path(base, named).expanduser().absolute() for base in ("", run.dir, type(run).dir)]
    likely = homes[0] if "/" in named else homes[1]
    home = next((home for home in homes if (home / _CHECKPOINTS).is_dir()), likely)
    place = home / _CHECKPOINTS
    step = {"latest": "", "best": str(checkpoint.best_step(place))}.get(name, name)
    try:
        path, damaged = checkpoint.resolve(place / step, thorough)
        stored = read_run_metadata(path.parent, int(path.name))
        settings: Any = OmegaConf.to_container(OmegaConf.create(stored.config), resolve=True)
    except (checkpoint.InitError, ValueError, OSError, OmegaConfBaseException) as error:
        problem = str(error).splitlines()[0] if home.is_dir() else missing_path(home)
        steps = ", ".join(map(str, steps_in(place))) or "none"
        raise ConfigError(
            f"run.fork={run.fork} {problem}",
            "Name a run by its folder or id, then @ and latest, best (by train.keep_best) or one "
            f"of its checkpoints: {steps}.",
        ) from None
    for line in damaged if thorough else ():
        _log.warning(line)
    return Parent(path, stored, settings)


def _adopt(parent: Parent, config: Config, home: RunFolder) -> None:
    """Copy a parent's checkpoint into a run's folder, as one that the run itself has saved."""
    path, run, before = parent
    step, data = int(path.name), fingerprint_dataset(config.dataset)
    next_batch, taken = run.next_batch, run.taken
    if data != run.data or any(below(key, _OF_DATA) for key in differences(run, config)):
        rows = run.next_batch * before["train"]["global_batch_size"]
        taken = rows_taken(config.dataset, before["dataset"], run.data, rows, run.taken)
        is_other = taken or data != run.data or before["dataset"]["name"] != config.dataset.name
        next_batch = 0 if is_other else -(-rows // config.train.global_batch_size)
        used = "".join(f", after {n:,} rows of {name}" for name, n in taken.items())
        _log.info(f"the data begin at batch {next_batch}{used}")
    config = replace(config, run=replace(config.run, fork=f"{path.parents[1]}@{step}"))
    plan = checkpoint.read_metadata(path.parent, step)["plan"]
    home.checkpoints.mkdir(exist_ok=True)
    position = {"next_batch": next_batch, "fingerprint": data, "taken": taken}
    about = contents(config, plan, step, position)
    if (kept := path.parents[1] / "autotune").is_dir():  # what XLA chose for the same programs
        whole = shutil.ignore_patterns("*.partial", "tmp")
        shutil.copytree(kept, home.path / kept.name, ignore=whole, dirs_exist_ok=True)
    copy_checkpoint(path, home.checkpoints / path.name, about, not config.run.shared)


class LostFolderError(OSError):
    """The run's folder was deleted or renamed during training; the text is one line."""


def write_plan(home: RunFolder, config: Config, plan: Plan) -> None:
    """Write `config.yaml`, resolved except for environment variables, and `plan.json`."""
    # Atomic, because another task of a Slurm job may be reading them.
    text = settings_text(home, config, to_written)
    write_whole(home.path / "config.yaml", text, config.cluster.holds_secrets)
    write_plan_alone(home, plan)


def settings_text(
    home: RunFolder, config: Config, write: Callable[[Config], dict[str, Any]] = redacted
) -> str:
    """Return a run's settings as YAML, as they are written to its folder but for secrets."""
    tree = write(replace(config, run=replace(config.run, id=home.id, fork=home.forked_from)))
    tree["run"]["dir"] = config.run.dir  # resolved: a job's variables may differ
    return yaml.safe_dump(tree, sort_keys=False)


def write_plan_alone(home: RunFolder, plan: Plan) -> None:
    """Write `plan.json`."""
    write_whole(home.path / "plan.json", json.dumps(plan.to_dict(), indent=2) + "\n")


def current_folder(home: RunFolder, config: Config, plan: Plan) -> Path:
    """Return the folder's present path; recreate a deleted folder from this process's memory.

    Then at least the metrics survive a command that was meant for another folder.
    """
    if (path := home.current_path()) is not None:
        return path
    path = home.path if not (home.path / LOCK).exists() else aside(home.path)  # another run's
    path.mkdir(parents=True, exist_ok=True)
    write_plan(replace(home, path=path), config, plan)
    complain(f"settings, plan and metrics of the run are written again, to {path}")
    return path


def fingerprints(config: Config) -> dict[str, str]:
    """Return the fingerprints of fixed settings that come from the environment, by their keys."""
    places = [dotted(place) for place in config.from_environment]
    return {
        key: _fingerprint(json.dumps(value))
        for key, value in flat(to_dict(config)).items()
        if below(key, _FIXED) and any(below(place, (key,)) for place in places)
    }


def check_same_run(path: Path, step: int, stored: RunMetadata, config: Config) -> None:
    """Check that the settings fit the checkpoint that the run is to resume from.

    Args:
        path: the run's folder.
        step: the checkpoint's step.
        stored: what the checkpoint says of its run.
        config: the settings now.

    Raises:
        ConfigError: a setting that must not change has changed, or the data has.
        launcher.recipes.InputError: the data cannot be used.
    """
    for key, (before, now) in differences(stored, config).items():
        if below(key, _FIXED) and key not in _FREE:
            raise ConfigError(
                f"{key}={now} does not fit run.id={path.name}, which reached step {step} "
                f"with {key}={before}",
                "Set it back to resume that run, or choose another run.id.",
            )
    if stored.data and stored.data != fingerprint_dataset(config.dataset):
        raise ConfigError(
            f"the data of dataset={config.dataset.name} has changed since run.id={path.name} "
            f"reached step {step}: its files hold something else",
            "Put the files back to resume that run, or choose another run.id.",
        )


def differences(stored: RunMetadata, config: Config) -> dict[str, tuple[str, str]]:
    """Return the settings that are others now than in a checkpoint: both as written, by key."""
    before, written, now = flat(stored.config), flat(redacted(config)), flat(to_dict(config))

    found: dict[str, tuple[str, str]] = {}
    for key in sorted(before.keys() | now.keys()):
        was, text, value = before.get(key), written.get(key), now.get(key)
        if key in stored.fingerprints:
            is_same = _matches(stored.fingerprints[key], json.dumps(value))
        else:
            is_same = was in (text, unresolved({key: value}, {})[key])
        if not is_same:  # a variable that has another value is written as before
            found[key] = shown(was), shown(value if text == was else text)
    return found


def contents(
    config: Config, plan: Mapping[str, Any], step: int, data: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the JSON-able metadata of the checkpoint after `step` steps.

    Args:
        config: the run's settings.
        plan: its plan, as `Plan.to_dict` returns it.
        step: the number of finished steps.
        data: the position in its data, with the names of `RunMetadata`; None: after `step` batches.
    """
    settings = redacted(config)
    # Resolved, even if it comes from a variable.
    settings["run"] |= {"id": config.run.id, "fork": config.run.fork}
    # Resolved as well: a variable of a later start must not change which checkpoints stay, or the
    # number of rows that were taken.
    settings["train"]["checkpoint"]["every_steps"] = config.train.checkpoint.every_steps
    settings["train"]["global_batch_size"] = config.train.global_batch_size
    return {
        "format": FORMAT,
        "config": settings,
        "fingerprints": fingerprints(config),
        "plan": plan,
        "data": data or {"next_batch": step},
        "metrics": {"next_step": step + 1},
    }


@functools.cache  # slow on purpose, and called at every save
def _fingerprint(text: str) -> str:
    salt = secrets.token_hex(16)
    return f"{salt}:{_digest(text, salt)}"


def _matches(fingerprint: str, text: str) -> bool:
    salt, _, digest = fingerprint.partition(":")
    return hmac.compare_digest(_digest(text, salt), digest)


def _digest(text: str, salt: str) -> str:
    """Return a digest that takes 50 ms to compute, so that nobody can try many values."""
    return hashlib.scrypt(text.encode(), salt=salt.encode(), n=2**14, r=8, p=1, dklen=32).hex()
