"""How much sooner the second start of the default command reaches its first step than the first.

    python tests/benchmarks/second_start.py [pairs]

Each pair starts with an empty cache folder. Prints, for both starts, the seconds from the start of
the process to the end of its first step, and the seconds of processor that the whole command took,
which a busy machine changes less.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from pathlib import Path

from turns import ratio, run_launcher, table


def start(cache: Path, name: str) -> tuple[float, float]:
    """Seconds to the first step, and of processor, of the default command but for its length."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = f"run.dir={cache}", f"run.id={name}", "train.steps=1", "wandb.mode=disabled"
    run_launcher(*words, cache=cache)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    summary = json.loads((cache / name / "summary.json").read_text())
    return summary["time_to_first_step_seconds"], cpu


def main() -> None:
    rows = []
    for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
        with tempfile.TemporaryDirectory() as folder:
            (first, cpu), (second, less) = (start(Path(folder), n) for n in ("first", "second"))
        rows.append((f"pair {number}", first, second, second / first, cpu, less))
    heads = "", "first, s", "second, s", "ratio", "first, CPU s", "second, CPU s"
    table(heads, rows)
    print(f"median ratio {ratio([row[2] for row in rows], [row[1] for row in rows]):.2f}")


if __name__ == "__main__":
    main()
