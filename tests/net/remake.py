"""Make the digests of the net again: `python tests/net/remake.py [pytest's -k WORDS]`.

It runs the tests of this folder, all tiers, which then keep what is fresh instead of comparing it;
without `-k`, cases that are no longer there go. Read `git diff tests/net/kept` before committing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main(words: list[str]) -> int:
    """Run the tests and return pytest's exit code."""
    if not words:
        shutil.rmtree(HERE / "kept", ignore_errors=True)
    one = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "slow or not slow"]
    environment = {**os.environ, "LAUNCHER_NET_REMAKE": "1"}
    command = [*one, "--durations=12", str(HERE / "test_net.py"), *words]
    return subprocess.call(command, cwd=HERE.parents[1], env=environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
