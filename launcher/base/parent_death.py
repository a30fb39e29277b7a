"""End a process with its parent: the kernel kills it, even if it is stopped or busy.

A process imports this module, or runs another program through this one:

    python parent_death.py PROGRAM.py ARGUMENT ...

Standard library only.
"""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    On other systems than Linux it does nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    end_with_parent()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
