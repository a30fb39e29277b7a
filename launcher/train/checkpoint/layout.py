"""Where what lies in a folder of checkpoints, and what of it is one. Standard library only.

    checkpoints/40/                     a checkpoint: the state after 40 steps
      checksums.json                    of all other files; see `integrity`
      _CHECKPOINT_METADATA              Orbax's, with our metadata in it
      default/                          the arrays, in Orbax's format
    checkpoints/50.partial-<token>/     one that is being written, or never was finished
    checkpoints/30.damaged/             one that was set aside

Whatever else somebody puts there is left alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

CHECKSUMS = "checksums.json"
METADATA = "_CHECKPOINT_METADATA"
ARRAYS = "default"
DAMAGED = ".damaged"
_PARTIAL = ".partial-"


def steps_in(folder: Path) -> list[int]:
    """The steps that `folder` holds checkpoints of, whole or damaged, oldest first; none where
    there is no folder. Empty folders are no checkpoints."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if _is_step(path.name) and path.is_dir()]
    return sorted(int(path.name) for path in named if any(path.iterdir()))


def read_metadata(folder: Path, step: int) -> dict[str, Any]:
    """The `metadata` that `folder/<step>` was saved with."""
    found: dict[str, Any] = json.loads((folder / str(step) / METADATA).read_bytes())
    return found["custom_metadata"]


def partial_path(folder: Path, step: int, token: str) -> Path:
    """Where `folder/<step>` is written until it is whole."""
    return folder / f"{step}{_PARTIAL}{token}"


def clear_partial(folder: Path) -> None:
    """Delete what saves that were cut off have left; only while nobody writes there."""
    for path in folder.glob(f"*{_PARTIAL}*") if folder.is_dir() else ():
        if _is_step(path.name.partition(_PARTIAL)[0]):
            shutil.rmtree(path, ignore_errors=True)


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit() and str(int(name)) == name
