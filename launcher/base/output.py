"""Standard output and standard error, apart from a run's console.

If nobody reads them any more (`| head`), nothing is printed and no error is raised, at exit either.
Standard library only.
"""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Callable
from typing import TypeAlias

# Takes how much of a phase is done, of how much, and of what; by default a share, 0 to 1.
Advance: TypeAlias = Callable[..., None]

# Control characters, lone surrogates, and what separates lines and paragraphs.
_OBEYED = "Cc", "Cs", "Zl", "Zp"
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def answer(text: str, end: str = "\n") -> int:
    """Print `text` at once and return the exit code.

    Returns:
        0, also if nobody reads it; 1 if it cannot be written (a full disk), which is reported on
            standard error.
    """
    if sys.stdout is None:  # closed by the parent process
        return 0
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        discard(1)
    except OSError as error:
        discard(1)
        complain(f"standard output: {error.strerror}")
        return 1
    return 0


def without_control(text: str) -> str:
    """Return a text without what a terminal would obey; lines and tabs stay."""
    return "".join("\ufffd" if _is_obeyed(c) else c for c in text)


def _is_obeyed(c: str) -> bool:
    return c not in "\n\t" and (c in _DIRECTIONS or unicodedata.category(c) in _OBEYED)


def complain(text: str) -> None:
    """Print `launcher: <text>` on standard error, if anybody reads that."""
    if sys.stderr is None:
        return
    try:
        print(f"launcher: {text}", file=sys.stderr, flush=True)
    except OSError:
        discard(2)


def discard(output: int) -> None:
    """Send everything written to this file descriptor from now on to /dev/null.

    That includes what Python has buffered, which would fail again at exit.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, output)
    os.close(null)
