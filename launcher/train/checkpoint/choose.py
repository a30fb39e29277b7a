"""Which checkpoint to go on from, or to start from: the newest that is whole.

`folder` asks on behalf of a run, `prepare` for `train.init_from`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.train.checkpoint.integrity import damage
from launcher.train.checkpoint.layout import CHECKSUMS, DAMAGED, METADATA, steps_in


@dataclass(frozen=True)
class Choice:
    """The newest whole checkpoint of a folder, and what is wrong with those that are newer.

    Attributes:
        step: None where none is whole.
        damaged: each newer step with what is wrong with it, newest first.
    """

    step: int | None
    damaged: tuple[tuple[int, str], ...] = ()


class InitError(Exception):
    """A path that holds nothing to start from: what is wrong with it, in a few words."""


def newest(folder: Path, thorough: bool = True) -> Choice:
    """The newest checkpoint in `folder` that is whole.

    Args:
        thorough: see `damage`.
    """
    damaged: list[tuple[int, str]] = []
    for step in reversed(steps_in(folder)):
        problem = damage(folder / str(step), thorough)
        if problem is None:
            return Choice(step, tuple(damaged))
        damaged.append((step, problem))
    return Choice(None, tuple(damaged))


def set_aside(folder: Path, step: int) -> Path | None:
    """Rename a damaged checkpoint, so that nobody takes it for the newest one, and nothing of it
    is lost; returns its new path, None where that cannot be done."""
    path = folder / f"{step}{DAMAGED}"
    number = 1
    while path.exists():
        number += 1
        path = folder / f"{step}{DAMAGED}-{number}"
    try:
        (folder / str(step)).rename(path)
    except OSError:
        return None
    return path


def resolve(path: Path) -> tuple[Path, tuple[str, ...]]:
    """The checkpoint that `path` means: one itself, or the newest whole one of a run's folder or of
    its `checkpoints`; and a line for each newer one that is damaged.

    Raises InitError where there is none.
    """
    try:
        return _resolved(path)
    except OSError as error:
        raise InitError(f"cannot be read ({error.strerror})") from None


def _resolved(path: Path) -> tuple[Path, tuple[str, ...]]:
    if not path.is_dir():
        raise InitError("is not a folder" if path.exists() else "does not exist")
    if (path / CHECKSUMS).exists() or (path / METADATA).exists():
        if problem := damage(path):
            raise InitError(f"is damaged: {problem}")
        return path, ()
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    choice = newest(folder)
    lines = tuple(f"{folder / str(step)} is damaged: {what}" for step, what in choice.damaged)
    if choice.step is not None:
        return folder / str(choice.step), lines
    if choice.damaged:
        step, what = choice.damaged[0]
        raise InitError(f"holds no checkpoint that is whole; in {step}, {what}")
    raise InitError("holds no checkpoint")
