"""How long the first step takes beside the later ones, with and without dry steps before it.

    python tests/benchmarks/first_step.py [rounds]

Each round trains the smoke recipe for 30 steps, in one worker and in two, without and with
`train.dry_steps=1`, and prints the first step's seconds by the median of those after the third.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMOKE = "recipe=smoke", "train.steps=30", "train.eval_every=0", "wandb.mode=disabled"


def ratio(folder: str, name: str, *words: str) -> float:
    """The first step's seconds by the median of later ones."""
    command = [sys.executable, "-m", "launcher", *SMOKE, f"run.dir={folder}", f"run.id={name}"]
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    lines = (Path(folder) / name / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["perf/step_seconds"] for line in lines]
    return seconds[0] / statistics.median(seconds[3:])


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    for _, hosts in itertools.product(range(rounds), (1, 2)):
        with tempfile.TemporaryDirectory() as folder:
            where = "cluster=emulated", "cluster.gpus=2", f"cluster.hosts={hosts}"
            cold, warm = (ratio(folder, f"dry{n}", f"train.dry_steps={n}", *where) for n in (0, 1))
        print(
            f"{hosts} workers: first step {cold:.1f} medians, after a dry step {warm:.2f} "
            f"(load {os.getloadavg()[0]:.1f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
