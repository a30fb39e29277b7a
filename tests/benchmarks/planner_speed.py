"""How long planning takes from the command, imports and tracing included.

    python tests/benchmarks/planner_speed.py            # some minutes
    python tests/benchmarks/planner_speed.py --known    # the four known cases alone

Prints wall and CPU seconds of `python -m launcher task=plan …` and the most memory that it takes,
for four known cases, and how they grow with the number of identical blocks and of devices.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

from turns import ROOT

GPT = [
    *("model=gpt", "train.precision=bf16", "train.eval_every=0", "train.global_batch_size=1024"),
    *("dataset=synthetic", "parallel=auto"),
]
GPT_175B = [
    *("model.scan_layers=true", "model.num_layers=96", "model.hidden_size=12288"),
    *("model.num_heads=96", "model.sequence_length=2048", "model.vocab_size=51200"),
]
KNOWN = {
    "MLP tutorial, 8 devices": (["recipe=pipeshard_tutorial", "parallel=auto"], 3.0),
    "GPT-39B, 64 devices": ([*GPT, "model.size=39b", "cluster=p3_16xlarge_x8"], 8.0),
    "GPT-76B, 1024 devices": ([*GPT, "model.size=76b", "cluster=h100_8_x128"], 12.0),
    "GPT-175B scanned, 1024": ([*GPT, *GPT_175B, "cluster=h100_8_x128"], 12.0),
}
BLOCKS = (12, 24, 48, 96)
HOSTS = (1, 2, 4, 8, 16)


def planned(arguments: list[str]) -> str:
    """Wall and CPU seconds of one plan, and the most memory that it took."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "launcher", "task=plan", f"run.dir={folder}", *arguments]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise SystemExit(errors.read())
    wall, cpu = time.perf_counter() - start, used.ru_utime + used.ru_stime
    return f"{wall:6.1f} s, {cpu:6.1f} s of CPU, {used.ru_maxrss / 2**20:5.2f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--known", action="store_true", help="only the four known cases")
    args = parser.parse_args()
    for name, (arguments, most) in KNOWN.items():
        print(f"{name:24} {planned(arguments)} (at most {most:.0f} s, 2 GiB)", flush=True)
    if args.known:
        return
    for blocks in BLOCKS:
        layers = ["model.size=6.7b", f"model.num_layers={blocks}", "cluster=h100_8_x16"]
        print(f"{blocks:4} blocks, 128 devices   {planned([*GPT, *layers])}", flush=True)
    for hosts in HOSTS:
        shape = ["cluster=h100_8_x16", f"cluster.hosts={hosts}", f"cluster.gpus={8 * hosts}"]
        found = planned([*GPT, "model.size=6.7b", *shape])
        print(f"  32 blocks, {8 * hosts:4} devices  {found}", flush=True)


if __name__ == "__main__":
    main()
