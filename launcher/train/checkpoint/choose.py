"""Which checkpoint to go on from, or to start from: the newest that is whole.

`folder` asks on behalf of a run, `prepare` for `train.init_from`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.files import DamagedError
from launcher.train.checkpoint.account import Account, read_account
from launcher.train.checkpoint.integrity import damage
from launcher.train.checkpoint.layout import CHECKSUMS, METADATA, steps_in


@dataclass(frozen=True)
class Choice:
    """The newest whole checkpoint of a folder, and what is wrong with those that are newer.

    Attributes:
        step: None where none is whole.
        damaged: each newer step with what is wrong with it, newest first.
        account: the step's, where a run asked.
    """

    step: int | None
    damaged: tuple[tuple[int, str], ...] = ()
    account: Account | None = None


class InitError(Exception):
    """A path that holds nothing to start from: what is wrong with it, in a few words."""


def newest(folder: Path, thorough: bool = True, run_id: str | None = None) -> Choice:
    """The newest checkpoint in `folder` that is whole.

    Args:
        thorough: see `damage`.
        run_id: one of another run counts as damaged.
    """
    damaged: list[tuple[int, str]] = []
    for step in reversed(steps_in(folder)):
        problem, account = damage(folder / str(step), thorough), None
        if problem is None and run_id is not None:
            account, problem = _own(folder, step, run_id)
        if problem is None:
            return Choice(step, tuple(damaged), account)
        damaged.append((step, problem))
    return Choice(None, tuple(damaged))


def _own(folder: Path, step: int, run_id: str) -> tuple[Account | None, str | None]:
    """A whole checkpoint's account, and what is wrong with it as one of the run."""
    try:
        account = read_account(folder, step)
    except OSError as error:
        return None, f"{METADATA} cannot be read ({error.strerror})"
    except DamagedError as error:
        return None, str(error)
    if account.run_id != run_id:
        return account, f"{METADATA} is of run {account.run_id!r}; a folder was renamed or copied"
    return account, None


def resolve(path: Path, thorough: bool = True) -> tuple[Path, tuple[str, ...]]:
    """The checkpoint that `path` means: one itself, or the newest whole one of a run's folder or of
    its `checkpoints`; and a line for each newer one that is damaged.

    Args:
        thorough: see `damage`.

    Raises InitError where there is none.
    """
    try:
        return _resolved(path, thorough)
    except OSError as error:
        raise InitError(f"cannot be read ({error.strerror})") from None


def _resolved(path: Path, thorough: bool) -> tuple[Path, tuple[str, ...]]:
    if not path.is_dir():
        raise InitError("is not a folder" if path.exists() else "does not exist")
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
        raise InitError(f"holds no checkpoint that is whole; in {step}, {what}")
    raise InitError("holds no checkpoint")
