"""Checkpoint directory layout, and which entries are complete. Standard library only.

    checkpoints/40/                     a checkpoint: the state after 40 steps
      checksums.json                    of all other files; see `integrity`
      _CHECKPOINT_METADATA              Orbax's, with our metadata in it
      default/                          the arrays, in Orbax's format
    checkpoints/50.partial-<token>/     one that is being written, or never was finished
    checkpoints/30.damaged/             one that was set aside
    checkpoints/best.json               which one had the best evaluation, if that is asked for

Whatever else somebody puts there is left alone.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

from launcher.base import read_json, write_whole

CHECKSUMS = "checksums.json"
METADATA = "_CHECKPOINT_METADATA"
ARRAYS = "default"
BEST = "best.json"
_PARTIAL = ".partial-"


def steps_in(folder: Path) -> list[int]:
    """Return the steps that `folder` holds checkpoints of, intact or damaged, oldest first.

    A missing folder holds none, and empty folders are no checkpoints. Raises OSError.
    """
    if not folder.is_dir():
        return []
    folders = [path for path in folder.iterdir() if is_step(path.name) and path.is_dir()]
    return sorted(int(path.name) for path in folders if not _is_empty(path))


def _is_empty(path: Path) -> bool:
    try:
        return not any(path.iterdir())
    except OSError:  # its contents cannot be read: damaged, but not empty
        return False


def read_metadata(folder: Path, step: int) -> dict[str, Any]:
    """Return the `metadata` that `folder/<step>` was saved with.

    Raises:
        OSError: it cannot be read.
        ValueError, KeyError, TypeError: it is damaged.
    """
    metadata: dict[str, Any] = read_json(folder / str(step) / METADATA)["custom_metadata"]
    return metadata


def write_best(folder: Path, step: int, metric: str, value: float) -> None:
    """Note which checkpoint of a folder has the best evaluation."""
    content = {"step": step, "metric": metric, "value": value}
    write_whole(folder / BEST, json.dumps(content) + "\n")


def best_step(folder: Path) -> int | None:
    """Return the step of the checkpoint with the best evaluation; None where none is noted."""
    try:
        step = read_json(folder / BEST)["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def stays(folder: Path, step: int) -> bool:
    """Return whether `folder/<step>` must never be deleted, as long as it is the best.

    That holds for the multiples of `every_steps` as it was set when the checkpoint was saved,
    whatever a later start sets; and for a checkpoint whose setting cannot be read.
    """
    path = folder / str(step) / METADATA
    if step == best_step(folder):
        return True
    try:
        every = _every_steps(path, path.stat().st_mtime_ns)
        return every > 0 and step % every == 0
    except (OSError, ValueError, KeyError, TypeError):
        return True


@functools.cache  # asked for each checkpoint at every save
def _every_steps(path: Path, modified: int) -> int:
    every: int = read_json(path)["custom_metadata"]["config"]["train"]["checkpoint"]["every_steps"]
    return every


def partial_path(final: Path, token: str) -> Path:
    """Return the path where the checkpoint `final` is written until it is complete."""
    return final.with_name(f"{final.name}{_PARTIAL}{token}")


def clear_partial_saves(folder: Path) -> None:
    """Delete the remains of interrupted saves; call it only while nobody writes there."""
    for path in folder.glob(f"*{_PARTIAL}*") if folder.is_dir() else ():
        if is_step(path.name.partition(_PARTIAL)[0]):
            shutil.rmtree(path, ignore_errors=True)


def is_step(name: str) -> bool:
    """Return whether a checkpoint may have that name."""
    return name.isascii() and name.isdigit() and str(int(name)) == name
