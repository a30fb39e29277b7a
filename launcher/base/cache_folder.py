"""The launcher's cache folder, and file names for the entries of one kind of machine."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import psutil

_NO_HOME = "/nonexistent"  # by custom


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
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            about.setdefault(name.strip(), value.strip())
    except (OSError, UnicodeError):  # another system: its architecture has to suffice
        pass
    name = about.get("model name", platform.machine())
    family = ".".join(about[key] for key in ("cpu family", "model") if key in about)
    return f"{name} {family} {len(psutil.Process().cpu_affinity() or [0])} cores"


def file_name(name: str) -> str:
    """Return a name as a part of a file's name: letters and digits, the rest `_`."""
    return "_".join(re.findall(r"[A-Za-z0-9]+", name))
