"""How long `launcher runs` takes with many run folders.

python tests/benchmarks/runs_list.py [COUNT]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main(count: int) -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as here:
        for number in range(count):
            folder = Path(here, "outputs", f"run-{number}")
            folder.mkdir(parents=True)
            status = {"phase": "done", "step": 9, "steps": 9, "updated_at": time.time()}
            (folder / "status.json").write_text(json.dumps(status))
            (folder / "summary.json").write_text(json.dumps({"exit_reason": "done", "steps": 9}))
        for _ in range(3):
            began = time.perf_counter()
            command = [sys.executable, "-m", "launcher", "runs"]
            subprocess.run(command, cwd=here, check=True, stdout=subprocess.DEVNULL)
            print(f"{count} runs listed in {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
