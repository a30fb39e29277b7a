"""A process that ends with the one that started it: stopped or busy, the kernel kills it.

Imported by such a process, or a program that runs another one so:

    python follow.py PROGRAM.py ARGUMENT ...

Standard library only.
"""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def follow() -> None:
    """Have the kernel kill this process when the thread that started it ends. Linux; elsewhere
    nothing is done."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    follow()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
