"""`python -m launcher` and the console script `launcher`: signals first, then the command line.

What is imported here is imported before a Ctrl-C can be answered, so it is next to nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from launcher.stop import Stop


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` and returns its exit code; where it is None, this process's own,
    of which nothing is left to do then."""
    with Stop() as stop:
        try:
            from launcher.command import run

            code = run(sys.argv[1:] if argv is None else argv, stop)
        except KeyboardInterrupt:
            code = stop.ending[0]
            if argv is None:  # what was left half done, such as an import, is not to end itself
                with suppress(Exception):  # which may be closed, or full
                    sys.stdout.flush()
                os._exit(code)
        if argv is None:
            stop.over(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
