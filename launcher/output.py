"""What is said on standard output and standard error before and besides a run's console.

`answer` and `complain` are how the front doors speak. Where nobody reads any more (`| head`) they
are silent, and so is Python at exit; `report.console` uses `discard` for the same. Standard library
only.
"""

from __future__ import annotations

import os
import sys


def answer(text: str, end: str = "\n") -> int:
    """Print `text` at once; the exit code: 0, also where nobody reads it, and 1 where it could not
    be written (a full disk), which is said on standard error."""
    if sys.stdout is None:  # closed by whoever started this
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


def complain(text: str) -> None:
    """Print `launcher: <text>` on standard error, if anybody reads that."""
    if sys.stderr is None:
        return
    try:
        print(f"launcher: {text}", file=sys.stderr, flush=True)
    except OSError:
        discard(2)


def discard(output: int) -> None:
    """Send what is written to this file descriptor from now on to nowhere. What Python still holds
    back is written at exit, which would fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, output)
    os.close(null)
