"""Measurements kept on disk, a JSON file each, for other runs and for one that was interrupted.

Below `$XDG_CACHE_HOME/launcher`, by default `~/.cache/launcher`. Each file says under which
versions it was measured; what is damaged or of other versions is ignored, and said. Used by
`profile.run` and by `plan.calibration`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("jax", "jaxlib", "launcher")


def cache_folder() -> Path:
    """Where measurements are kept."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "launcher"


def versions() -> dict[str, str]:
    """Of what a measurement depends on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a checkout that is not installed
            found[name] = "unknown"
    return found


def read(path: Path, fields: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any] | None:
    """The measurement in a file that holds all of `fields`; None where there is none to use."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeError) as error:
        say(f"{path} cannot be read ({error}): ignored, measured again")
        return None
    try:
        tree = json.loads(text)
    except ValueError:
        tree = None
    if not isinstance(tree, dict) or not isinstance(tree.get("versions"), dict):
        say(f"{path} is damaged: ignored, measured again")
        return None
    if tree["versions"] != versions():
        other = ", ".join(f"{k} {v}" for k, v in tree["versions"].items() if versions().get(k) != v)
        say(f"{path} is of other versions ({other}): ignored, measured again")
        return None
    if any(field not in tree for field in fields):
        say(f"{path} is damaged: ignored, measured again")
        return None
    return tree


def write(path: Path, tree: dict[str, Any], say: Callable[[str], None]) -> None:
    """Keep a measurement, whole or not at all. A disk that is full costs the cache, not the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".partial", delete=False
        ) as file:
            json.dump({"versions": versions(), **tree}, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        say(f"{path} cannot be written ({error.strerror}): the measurement is not kept")
