"""Measurements kept on disk, a JSON file each, for other runs and for one that was interrupted.

Below `$XDG_CACHE_HOME/launcher`, by default `~/.cache/launcher`. A file's name begins with the
devices that were measured; of a CPU these are the processor's model and cores, since several
machines may share a home. Each file says under which versions it was measured; what is damaged, of
other versions or of another machine is ignored, and said.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from launcher.cache_folder import cache_folder, file_name, processor
from launcher.files import DamagedError, make_private, read_json, write_whole
from launcher.plan.cluster_shape import ClusterShape

T = TypeVar("T")

_PACKAGES = ("jax", "jaxlib", "launcher")
_FORMAT = "2"  # of what the figures mean; to be raised with it


def place(folder: str, cluster: ClusterShape, what: str, say: Callable[[str], None]) -> Path:
    """The file of one measurement of a cluster's devices; says so where only other machines'
    processors have one."""
    kind, end = file_name(cluster.device_kind), f"-{cluster.num_devices}{what}.json"
    if cluster.device_kind != "cpu":
        return cache_folder() / folder / f"{kind}{end}"
    own = cache_folder() / folder / f"{kind}-{file_name(processor())}{end}"
    if not own.exists():
        for other in sorted(own.parent.glob(f"{kind}-*{end}")):
            machine = other.name.removeprefix(f"{kind}-").removesuffix(end)
            say(f"{own.parent}: what was measured on another machine ({machine}) is ignored")
    return own


def versions() -> dict[str, str]:
    """Of what a measurement depends on."""
    found = {"format": _FORMAT}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a checkout that is not installed
            found[name] = "unknown"
    return found


def read(
    path: Path,
    made: Callable[[dict[str, Any]], T],
    say: Callable[[str], None],
    then: str = "measured again",
) -> T | None:
    """What `made` makes of the measurement in a file; None where there is none to use.

    Args:
        made: any error that it raises over what it is given means that the file is damaged.
        say: told in a line what is ignored. then: what happens instead.
    """
    try:
        tree = read_json(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        say(f"{path} cannot be read ({error}): ignored, {then}")
        return None
    except DamagedError:
        tree = None
    here = versions()
    try:
        found = tree["versions"]
        if isinstance(found, dict) and found != here:
            other = ", ".join(f"{k} {v}" for k, v in found.items() if here.get(k) != v)
            other = other or "an earlier format"
            say(f"{path} is of other versions ({other}): ignored, {then}")
            return None
        if found == here:
            return made(tree)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        pass
    say(f"{path} is damaged: ignored, {then}")
    return None


def number(value: Any, least: float = 0.0) -> float:
    """A finite number of at least `least`.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is no number")
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{value} is not finite and at least {least}")
    return float(value)


def positive(value: Any) -> float:
    """A finite number above 0.

    Raises:
        ValueError: it is none.
    """
    return number(value, sys.float_info.min)


def write(path: Path, tree: dict[str, Any], say: Callable[[str], None]) -> bool:
    """Keep a measurement, whole or not at all; returns whether it is kept. A disk that is full
    costs the cache, not the run."""
    try:
        make_private(path.parent)  # compiled programs are kept beside it: `runtime.kept`
        write_whole(path, json.dumps({"versions": versions(), **tree}, indent=1) + "\n")
    except OSError as error:
        say(f"{path} cannot be written ({error.strerror}): the measurement is not kept")
        return False
    return True
