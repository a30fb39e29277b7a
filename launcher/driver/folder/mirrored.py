"""A run and its mirror, `run.mirror`: who owns it, what it has that the disk lacks, its process."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from launcher import checkpoint
from launcher.base import Advance, complain, read_own, stores, to_type, write_whole
from launcher.checkpoint import (
    Mirror,
    MirrorCopy,
    Mirroring,
    damage,
    newest,
    note_roll_back,
    steps_in,
)
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.driver.folder.folder import RunFolder, claim, delete_on_error, settings_text
from launcher.report import console as terminal
from launcher.stop import Stop

_IDENTITY = "mirror.json"  # in the run's folder
_PATIENCE = 3.0  # seconds, before anything has started
_POLL_SECONDS = 0.2

_log = logging.getLogger(__name__)


def look_at_mirror(config: Config) -> tuple[Mirror, str, Sequence[MirrorCopy]] | None:
    """Return a run's mirror, its owner and its copies if this disk lacks the newest, else None.

    Raises:
        ConfigError: the mirror cannot be used, or is another run's.
        OSError: it cannot be reached, and nobody knows whether it is this run's.
    """
    url, run = config.run.mirror, config.run
    if url is None or run.id is None:
        return None
    home = Path(run.dir, run.id)
    known = read_own(home / _IDENTITY, str)
    here = newest(home / "checkpoints", thorough=False).step or 0
    try:
        mirror = Mirror(stores.Store(url, _PATIENCE))
        if owner := mirror.owner():
            _check_owner(config, owner, known, here)
            copies = mirror.copies()
            if copies and run.resume == "never" and known is None:
                raise ConfigError(
                    f"run.mirror={url} holds a run {run.id} already, and run.resume=never",
                    "Choose another prefix, or use run.resume=auto to resume that run.",
                )
            if copies and copies[0].step > here:
                return mirror, owner, copies
    except stores.UnavailableError as error:
        if known is None or not here:
            raise OSError(f"run.mirror: {error}") from None
        _log.warning(f"run.mirror: {error}; training begins with the checkpoints that are here")
        return None
    except stores.StoreError as error:
        raise _unusable(url, error) from None
    if run.resume == "must" and not here:
        raise ConfigError(
            f"run.resume=must finds nothing to resume from: neither {home} nor {url} holds a "
            "checkpoint",
            "Check run.id, run.dir and run.mirror, or use run.resume=auto.",
        )
    return None


def _check_owner(config: Config, owner: str, known: str | None, here: int) -> None:
    run, url, (owner_id, _, _) = config.run, config.run.mirror, owner.partition("/")
    if owner_id != run.id:
        raise ConfigError(
            f"run.mirror={url} belongs to run {owner_id}",
            f"Choose another prefix for run {run.id}, or resume that run with "
            f"{to_type(('run.id', owner_id))}.",
        )
    if known not in (None, owner) or (known is None and here):
        raise ConfigError(
            f"run.mirror={url} belongs to another run {run.id} than {Path(run.dir, run.id or '')}",
            "Choose another prefix; or another run.dir, to resume the run that the mirror has.",
        )


def _unusable(url: str, error: stores.StoreError) -> ConfigError:
    problem, install, command = str(error).partition("; pip install")
    remedy = "Give credentials and a bucket that exists, or leave out run.mirror."
    if install:
        remedy = f"Install it: pip install{command}."
    return ConfigError(f"run.mirror={url} cannot be used: {problem}", remedy)


def bring_back(config: Config, console: Console) -> None:
    """Write the newest intact checkpoint of the mirror to the disk, if that has none as new.

    Raises:
        ConfigError: as of `look_at_mirror`, or no checkpoint of the mirror is intact.
        OSError: the disk is full or broken, or the mirror cannot be reached.
    """
    if (found := look_at_mirror(config)) is None or config.task == "preflight":
        return
    mirror, owner, copies = found
    mirror.store.patience = stores.PATIENCE
    with claim(config) as home, delete_on_error(home.created, on=ConfigError):
        _note(home.path, owner)
        for line in home.damaged:
            _log.warning(line)
        later = [copy for copy in copies if copy.step > home.finished_steps]
        try:
            is_there = _fetch(mirror, later, home.path, console)
        except stores.StoreError as error:
            raise OSError(f"run.mirror: {error}") from None
        if not is_there and not home.finished_steps:
            raise ConfigError(
                f"run.id={home.id} cannot be resumed: nothing in {mirror.store.url} is intact",
                "Choose another prefix and run.id to start afresh.",
            )


def fetch_older(config: Config, home: RunFolder, step: int, console: Console) -> str:
    """Write the mirror's newest checkpoint of a step up to `step` to a disk that has none intact.

    Returns:
        That there is none, and why; empty if there is one.
    """
    url, problem = config.run.mirror, f"there is no checkpoint of a step up to {step}"
    try:
        here = [home.checkpoints / str(each) for each in steps_in(home.checkpoints) if each <= step]
        if any(damage(path, thorough=url is not None) is None for path in reversed(here)):
            return ""
        if url is None:
            return problem
        mirror = Mirror(stores.Store(url))
        is_own = mirror.owner() == read_own(home.path / _IDENTITY, str)
        older = [copy for copy in mirror.copies() if is_own and copy.step <= step]
        return "" if _fetch(mirror, older, home.path, console, alone=True) else problem
    except (stores.StoreError, OSError) as error:
        return f"{problem} (run.mirror: {error})"


def go_back(config: Config, home: RunFolder, step: int) -> None:
    """Delete the checkpoints of later steps, and have the mirror do so, too."""
    if config.run.mirror is not None:
        note_roll_back(home.path, step)
    checkpoint.drop_after(home.checkpoints, step)  # imports JAX


def _fetch(
    mirror: Mirror, copies: Sequence[MirrorCopy], home: Path, console: Console, alone: bool = False
) -> bool:
    """Fetch the first of the copies that is intact; return whether one is."""
    for copy in copies:
        doing = f"fetching step {copy.step} from {mirror.store.url}"
        with terminal.status(console, doing) as advance:
            problem = mirror.fetch(copy, home, _in_mib(advance), alone)
        if problem is None:
            return True
        _log.warning(f"checkpoint {copy.step} of {mirror.store.url} is damaged: {problem}")
    return False


def _in_mib(advance: Advance) -> Callable[[int, int], None]:
    return lambda done, total: advance(done >> 20, total >> 20, "MiB")


def _note(home: Path, owner: str) -> None:
    write_whole(home / _IDENTITY, json.dumps(owner) + "\n", private=True)


def own(config: Config, home: RunFolder) -> str | None:
    """Return who a run is to its mirror, which belongs to it from now on; None without one.

    Raises:
        ConfigError: the mirror cannot be used, or is another run's.
    """
    url = config.run.mirror
    if url is None:
        return None
    if (known := read_own(home.path / _IDENTITY, str)) is not None:
        return known  # `look_at_mirror` has compared it
    owner = f"{home.id}/{secrets.token_hex(8)}"
    _note(home.path, owner)  # first: the store may have it, and its answer be lost
    try:
        mirror = Mirror(stores.Store(url, _PATIENCE))
        if not mirror.own(owner):
            owner = mirror.owner() or owner
            _check_owner(config, owner, None, home.finished_steps)
            # This run began on another disk, or was killed here, and has not saved yet.
            _note(home.path, owner)
    except stores.StoreError as error:
        raise _unusable(url, error) from None
    return owner


@contextmanager
def mirroring(config: Config, home: RunFolder, console: Console, stop: Stop) -> Iterator[None]:
    """Mirror the checkpoints that appear meanwhile; at the end, wait until all are mirrored.

    Ctrl-C ends the wait. What is not mirrored is reported.
    """
    url, keep, owner = config.run.mirror, config.train.checkpoint.keep, own(config, home)
    if url is None or owner is None or config.task == "preflight":
        yield
        return
    texts = {"config.yaml": settings_text(home, config)}
    process = Mirroring(url, home.path, owner, keep, texts, _log.warning)
    try:
        yield
        _wait(process, url, console, stop)
    except Exception:
        _wait(process, url, console, stop)
        raise
    finally:
        process.kill()
        step = max(steps_in(home.checkpoints), default=0)
        if step != process.mirrored:
            complain(
                f"not mirrored to {url}: step {step}; the next start of run {home.id} tries again"
            )


def _wait(process: Mirroring, url: str, console: Console, stop: Stop) -> None:
    """Wait until all is mirrored, or for a signal that comes meanwhile."""
    process.finish()
    if process.wait(_POLL_SECONDS):
        return
    before = stop.requested, stop.repeats
    leaves = "Ctrl-C leaves the newest checkpoint on this disk alone"
    with (
        stop.heeded(terminal.line_printer(console), leaves, until="asked"),
        terminal.status(console, f"mirroring to {url}", terminal.Phase.MIRRORING) as advance,
    ):
        while not process.wait(_POLL_SECONDS) and before == (stop.requested, stop.repeats):
            if process.progress:
                _in_mib(advance)(*process.progress)
