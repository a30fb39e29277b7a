"""Pick the checkpoint to resume or to start from: the newest that is intact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.arrays.npz import read_headers
from launcher.base import DamagedError, missing_path
from launcher.checkpoint.layout import CHECKSUMS, METADATA, damage, read_metadata, steps_in
from launcher.recipes.models.hugging_face import CONFIG


@dataclass(frozen=True)
class RunMetadata:
    """The metadata of a checkpoint that a run resumes by.

    Attributes:
        run_id: the run that saved it.
        config: that run's settings.
        fingerprints: by its key, the fingerprint of a setting that came from the environment.
        next_batch: the index of the next batch, from 0.
        data: the fingerprint of the dataset's content; "" where it has none.
        taken: the rows that were taken before batch 0, by their source: see `Dataset.after`.
    """

    run_id: str
    config: dict[str, Any]
    fingerprints: dict[str, str]
    next_batch: int
    data: str = ""
    taken: Mapping[str, int] = field(default_factory=dict)


def read_run_metadata(folder: Path, step: int) -> RunMetadata:
    """Read the metadata of `folder/<step>`.

    Raises:
        OSError: it cannot be read.
        DamagedError: it is not a run's, or is for another step; the text is a few words.
    """
    try:
        metadata = read_metadata(folder, step)
        config, next_batch = metadata["config"], metadata["data"]["next_batch"]
        data, taken = metadata["data"].get("fingerprint", ""), metadata["data"].get("taken", {})
        prints = metadata.get("fingerprints", {})
        next_step, run_id = metadata["metrics"]["next_step"], config["run"]["id"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedError(f"{METADATA} is not a run's") from None
    if not isinstance(config, dict) or not isinstance(run_id, str):
        raise DamagedError(f"{METADATA} names no run")
    if not isinstance(prints, dict) or not all(isinstance(x, str) for x in prints.values()):
        raise DamagedError(f"{METADATA} holds no fingerprints of settings")
    if next_step != step + 1:
        raise DamagedError(f"{METADATA} continues at step {next_step!r}, not {step + 1}")
    if not isinstance(taken, dict) or not all(type(n) is int and n >= 0 for n in taken.values()):
        raise DamagedError(f"{METADATA} continues after {taken!r} rows of its data")
    if type(next_batch) is not int or next_batch < 0:
        raise DamagedError(f"{METADATA} continues at batch {next_batch!r}")
    if not isinstance(data, str):
        raise DamagedError(f"{METADATA} holds no fingerprint of its data")
    return RunMetadata(run_id, config, prints, next_batch, data, taken)


@dataclass(frozen=True)
class NewestIntact:
    """The newest intact checkpoint of a folder, and the newer ones that are damaged.

    Attributes:
        step: its step, or None if no checkpoint is intact.
        damaged: the newer steps, newest first, each with what is wrong with it.
        run: the metadata of `step`, if a run's id was given.
    """

    step: int | None
    damaged: tuple[tuple[int, str], ...] = ()
    run: RunMetadata | None = None


class InitError(Exception):
    """There is nothing to start from at a path; the text is a few words."""


def newest(folder: Path, thorough: bool = True, run_id: str | None = None) -> NewestIntact:
    """Return the newest intact checkpoint in `folder`.

    Args:
        folder: a folder of checkpoints.
        thorough: whether to read all files, see `damage`.
        run_id: the run that must have saved it; a checkpoint of another run counts as damaged.
    """
    damaged: list[tuple[int, str]] = []
    for step in reversed(steps_in(folder)):
        problem, run = damage(folder / str(step), thorough), None
        if problem is None and run_id is not None:
            run, problem = _own(folder, step, run_id)
        if problem is None:
            return NewestIntact(step, tuple(damaged), run)
        damaged.append((step, problem))
    return NewestIntact(None, tuple(damaged))


def _own(folder: Path, step: int, run_id: str) -> tuple[RunMetadata | None, str | None]:
    """Return an intact checkpoint's metadata, and why it is not one of the run's, if so."""
    try:
        run = read_run_metadata(folder, step)
    except OSError as error:
        return None, f"{METADATA} cannot be read ({error.strerror})"
    except DamagedError as error:
        return None, str(error)
    if run.run_id != run_id:
        return run, f"{METADATA} is of run {run.run_id!r}; a folder was renamed or copied"
    return run, None


def resolve(path: Path, thorough: bool = True) -> tuple[Path, tuple[str, ...]]:
    """Return the checkpoint that a path names, and a line for each newer one that is damaged.

    Args:
        path: a checkpoint, a folder of checkpoints or a run's folder, of which the newest intact
            checkpoint is taken; or an `.npz` file or a folder of Hugging Face's, which is taken as
            it is.
        thorough: whether to read all files, see `damage`.

    Raises:
        InitError: there is none.
    """
    try:
        return _resolved(path, thorough)
    except OSError as error:
        raise InitError(f"cannot be read ({error.strerror})") from None


def _resolved(path: Path, thorough: bool) -> tuple[Path, tuple[str, ...]]:
    if not path.exists():
        raise InitError(missing_path(path))
    if not path.is_dir():
        try:
            read_headers(path)
        except DamagedError as error:
            raise InitError(f"cannot be used: {error}") from None
        return path, ()
    if (path / CONFIG).exists():
        return path, ()
    if (path / CHECKSUMS).exists() or (path / METADATA).exists():
        if problem := damage(path, thorough):
            raise InitError(f"is damaged: {problem}")
        return path, ()
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    choice = newest(folder, thorough)
    lines = tuple(f"{folder / str(step)} is damaged: {what}" for step, what in choice.damaged)
    if choice.step is not None:
        return folder / str(choice.step), lines
    if choice.damaged:
        step, what = choice.damaged[0]
        raise InitError(f"holds no intact checkpoint; in {step}, {what}")
    raise InitError("holds no checkpoint")
