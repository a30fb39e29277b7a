"""What is said of a path that does not exist. Standard library only."""

from __future__ import annotations

import difflib
import itertools
from pathlib import Path

_MOST_ENTRIES = 10_000  # of a folder, among which a near name is looked for


def missing_path(path: Path) -> str:
    """Return that a path does not exist, and which one in its folder does that is near."""
    try:
        some = itertools.islice(path.parent.iterdir(), _MOST_ENTRIES)
        there = [entry.name for entry in some if entry.name != path.name]  # a link to nowhere is
    except OSError:
        there = []
    near = difflib.get_close_matches(path.name, there, n=1, cutoff=0.75)
    return f"does not exist ({path.with_name(near[0])} does)" if near else "does not exist"
