"""Set up a process: it ends with its parent, and on CPUs keeps the memory that it frees.

The kernel kills it with the parent, even if it is stopped or busy. A process imports this module,
or runs another program through this one:

    python process_setup.py PROGRAM.py ARGUMENT ...

glibc gives large freed buffers back to the kernel, which zeroes a page at each first touch. A step
frees and takes the same buffers each time: up to 30,000 faults and a sixth of its time, or none, by
luck of their order. The price: memory that was needed once stays with the process. Other libraries
of C know none of these settings, and nothing happens there.

Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1
# glibc's environment variable (mallopt(3)), the number of the parameter in malloc.h, its value
_SETTINGS = {
    "MALLOC_MMAP_MAX_": (-4, 0),  # no buffer is a mapping of its own, which ends when it is freed
    "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1),  # bytes free at its end before the heap shrinks
    "MALLOC_TOP_PAD_": (-2, 64 << 20),  # bytes by which the heap grows beyond what is asked for
}
KEPT = {name: str(value) for name, (_, value) in _SETTINGS.items()}


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    On other systems than Linux it does nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def keep_memory() -> bool:
    """Keep the memory that this process frees from now on; return whether its C library can.

    A process that is started with `KEPT` does so from its beginning. What the user has set by
    one of them stays.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    mine = [pair for name, pair in _SETTINGS.items() if name not in os.environ]
    return set_option is not None and all(set_option(*pair) == 1 for pair in mine)


if __name__ == "__main__":
    end_with_parent()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
