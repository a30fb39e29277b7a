"""`python -m launcher` and the console script `launcher`: signals first, then the command line.

A Ctrl-C cannot be answered before these imports are done, so there are few of them.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from launcher.stop import Stop


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return its exit code.

    Args:
        argv: the arguments; None takes those of this process, which then has nothing else to do.
    """
    if argv is None:
        gc.set_threshold(50_000)  # imports, tracing and planning make millions of objects that stay
    words = sys.argv[1:] if argv is None else argv
    with Stop() as stop:
        if "--json" in words:  # whose output is for an object
            stop.last_words = lambda: (2, "launcher: stopping\n")
        try:
            from launcher.cli.outcome import run

            code = run(words, stop)
        except KeyboardInterrupt:
            code = stop.ending[0]
            if argv is None:  # half-done work, such as an import, must not clean up
                with suppress(Exception):  # it may be closed, or the disk full
                    sys.stdout.flush()
                with suppress(KeyError, AttributeError):  # not imported, or half
                    sys.modules["launcher.cluster.ray.scratch"].remove_shared_memory()
                os._exit(code)
        if argv is None:
            stop.over(code)
            gc.freeze()  # at its exit Python would look once more through all that is there
    return code


if __name__ == "__main__":
    sys.exit(main())
