"""How much sooner the second start of the default command reaches its first step than the first.

    python tests/benchmarks/second_start.py [pairs]

Each pair starts with an empty cache folder. Prints, for both starts, the seconds from the start of
the process to the end of its first step, and the seconds of processor that the whole command took,
which a busy machine changes less; then the ratios, and their medians.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(cache: Path, name: str) -> tuple[float, float]:
    """Seconds to the first step, and of processor, of the default command but for its length."""
    settings = [f"run.dir={cache}", f"run.id={name}", "train.steps=1", "wandb.mode=disabled"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *settings],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    summary = json.loads((cache / name / "summary.json").read_text())
    return summary["time_to_first_step_seconds"], cpu


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    ratios = []
    for _ in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder)
            (first, of_first), (second, of_second) = start(cache, "first"), start(cache, "second")
        ratios.append(second / first)
        print(
            f"first step after {first:.1f} s, in the second start after {second:.1f} s: "
            f"{ratios[-1]:.2f} ({of_first:.1f} and {of_second:.1f} s of processor; "
            f"load {os.getloadavg()[0]:.1f})",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
