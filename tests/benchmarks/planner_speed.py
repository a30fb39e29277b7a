"""How long planning takes from the command, imports and tracing included.

    python tests/benchmarks/planner_speed.py            # some minutes
    python tests/benchmarks/planner_speed.py --known    # the four known cases alone

Prints wall and CPU seconds of `python -m launcher task=plan …` for four known cases, and how they
grow with the number of identical blocks and of devices.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
GPT = [
    "model=gpt",
    "train.precision=bf16",
    "train.eval_every=0",
    "train.global_batch_size=1024",
    "dataset=synthetic",
    "parallel=auto",
]
GPT_175B = [
    "model.scan_layers=true",
    "model.num_layers=96",
    "model.hidden_size=12288",
    "model.num_heads=96",
    "model.sequence_length=2048",
    "model.vocab_size=51200",
]
KNOWN = {
    "MLP tutorial, 8 devices": (["recipe=pipeshard_tutorial", "parallel=auto"], 3.0),
    "GPT-39B, 64 devices": ([*GPT, "model.size=39b", "cluster=p3_16xlarge_x8"], 8.0),
    "GPT-76B, 1024 devices": ([*GPT, "model.size=76b", "cluster=h100_8_x128"], 12.0),
    "GPT-175B scanned, 1024": ([*GPT, *GPT_175B, "cluster=h100_8_x128"], 12.0),
}
BLOCKS = (12, 24, 48, 96)
HOSTS = (1, 2, 4, 8, 16)


def planned(arguments: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of one plan."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "launcher", "task=plan", f"run.dir={folder}", *arguments]
        result = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode:
        raise SystemExit(result.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--known", action="store_true", help="only the four known cases")
    args = parser.parse_args()
    for name, (arguments, most) in KNOWN.items():
        wall, cpu = planned(arguments)
        print(f"{name:24} {wall:6.1f} s, {cpu:6.1f} s of CPU (at most {most:.0f} s)", flush=True)
    if args.known:
        return
    for blocks in BLOCKS:
        layers = ["model.size=6.7b", f"model.num_layers={blocks}", "cluster=h100_8_x16"]
        wall, cpu = planned([*GPT, *layers])
        print(f"{blocks:4} blocks, 128 devices   {wall:6.1f} s, {cpu:6.1f} s of CPU", flush=True)
    for hosts in HOSTS:
        shape = ["cluster=h100_8_x16", f"cluster.hosts={hosts}", f"cluster.gpus={8 * hosts}"]
        wall, cpu = planned([*GPT, "model.size=6.7b", *shape])
        print(f"  32 blocks, {8 * hosts:4} devices  {wall:6.1f} s, {cpu:6.1f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
