"""The user's cache folder, and measurements in it for other runs, or for one that was interrupted.

The folder is `$XDG_CACHE_HOME/launcher`, by default `~/.cache/launcher`. Each measurement is a JSON
file whose name begins with the devices that were measured; for a CPU these are the processor's
model and cores, since several machines may share a home. Each file names the versions that it was
measured with. A file that is damaged, of other versions or of another machine is ignored, with a
message.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import psutil

from launcher.base.files import DamagedError, make_private, read_json, write_whole
from launcher.base.libraries import DISTRIBUTION
from launcher.base.output import warn_once

T = TypeVar("T")

_PACKAGES = ("jax", "jaxlib", DISTRIBUTION)
_FORMAT = "6"  # of what the figures mean; to be raised with it
_NO_HOME = "/nonexistent"  # by custom

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return the folder for measurements and compiled programs.

    For a user without a home it is a folder that cannot be made.
    """
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root, "launcher")
    home = os.path.expanduser("~")
    return Path(_NO_HOME if home == "~" else home, ".cache", "launcher")


def processor() -> str:
    """Return in words this machine's processor and the number of cores this process may use."""
    about: dict[str, str] = {}
    with suppress(OSError, UnicodeError):  # another system: its architecture has to suffice
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            about.setdefault(name.strip(), value.strip())
    name = about.get("model name", platform.machine())
    family = ".".join(about[key] for key in ("cpu family", "model") if key in about)
    return f"{name} {family} {len(psutil.Process().cpu_affinity() or [0])} cores"


def file_name(name: str) -> str:
    """Return a name as a part of a file's name: letters and digits, the rest `_`."""
    return "_".join(re.findall(r"[A-Za-z0-9]+", name))


def cache_file(folder: str, device_kind: str, num_devices: int, what: str = "") -> Path:
    """Return the file of one measurement of devices."""
    kind, end = file_name(device_kind), f"-{num_devices}{what}.json"
    if device_kind == "cpu":
        kind += f"-{file_name(processor())}"
    return cache_folder() / folder / f"{kind}{end}"


def versions() -> dict[str, str]:
    """Return the versions of what a measurement depends on."""
    found = {"format": _FORMAT}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a checkout that is not installed
            found[name] = "unknown"
    return found


def read_cached(
    path: Path, made: Callable[[dict[str, Any]], T], then: str = "measured again"
) -> T | None:
    """Return what `made` makes of the measurement in a file, or None where there is none to use.

    A process logs one warning for each ignored measurement.

    Args:
        path: the file.
        made: converts the file's contents; any error that it raises over them means that the file
            is damaged.
        then: what happens instead, for the warning.
    """
    try:
        tree = read_json(path)
    except FileNotFoundError:
        _warn_of_other_machines(path)
        return None
    except OSError as error:
        warn_once(_log, f"{path} cannot be read ({error}): ignored, {then}")
        return None
    except DamagedError:
        tree = None
    here = versions()
    with suppress(ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        found = tree["versions"]
        if isinstance(found, dict) and found != here:
            other = ", ".join(f"{k} {v}" for k, v in found.items() if here.get(k) != v)
            other = other or "an earlier format"
            warn_once(_log, f"{path} is of other versions ({other}): ignored, {then}")
            return None
        if found == here:
            return made(tree)
    warn_once(_log, f"{path} is damaged: ignored, {then}")
    return None


def _warn_of_other_machines(path: Path) -> None:
    """Warn if other machines' processors have a file where this machine's has none."""
    kind, own, end = path.name.partition(f"-{file_name(processor())}-")
    if own:
        for other in sorted(path.parent.glob(f"{kind}-*-{end}")):
            if other.name.startswith(f"{kind}-{file_name(processor())}-"):
                continue  # another measurement of this machine
            machine = other.name.removeprefix(f"{kind}-").removesuffix(f"-{end}")
            text = f"what was measured on another machine ({machine}) is ignored"
            warn_once(_log, f"{path.parent}: {text}")


def finite_number(value: Any, least: float = 0.0) -> float:
    """Return a finite number of at least `least`.

    Raises:
        ValueError: the value is not such a number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{value} is not finite and at least {least}")
    return float(value)


def positive(value: Any) -> float:
    """Return a finite number above 0.

    Raises:
        ValueError: the value is not such a number.
    """
    return finite_number(value, sys.float_info.min)


def write(path: Path, tree: dict[str, Any]) -> bool:
    """Keep a measurement, whole or not at all, and return whether it is kept.

    A full disk costs the cache, not the run, and is warned of.
    """
    try:
        make_private(path.parent)  # compiled programs are kept beside it: `compilation_cache`
        write_whole(path, json.dumps({"versions": versions(), **tree}, indent=1) + "\n")
    except OSError as error:
        _log.warning(f"{path} cannot be written ({error.strerror}): the measurement is not kept")
        return False
    return True
