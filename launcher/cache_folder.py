"""The launcher's cache folder, and file names for what belongs to one kind of machine."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import psutil

_NO_HOME = "/nonexistent"  # by custom


def cache_folder() -> Path:
    """Return where measurements and compiled programs are kept.

    For a user without a home it is a place where nothing can be kept.
    """
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root, "launcher")
    home = os.path.expanduser("~")
    return Path(_NO_HOME if home == "~" else home, ".cache", "launcher")


def processor() -> str:
    """This machine's processor, and how many of its cores this process may use, in words."""
    about: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            about.setdefault(name.strip(), value.strip())
    except (OSError, UnicodeError):  # another system: its architecture has to do
        pass
    name = about.get("model name", platform.machine())
    family = ".".join(about[key] for key in ("cpu family", "model") if key in about)
    return f"{name} {family} {len(psutil.Process().cpu_affinity() or [0])} cores"


def file_name(name: str) -> str:
    """A name as a part of a file's name: letters and digits, the rest `_`."""
    return "_".join(re.findall(r"[A-Za-z0-9]+", name))
