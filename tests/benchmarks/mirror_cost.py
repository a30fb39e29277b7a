"""What a mirror costs: processor time and time of a step beside its process, and without it.

    python tests/benchmarks/mirror_cost.py [--blocks 4] [--every 6]

Two processors train all the time. Blocks of steps during which the process copies a checkpoint to a
server on this machine, whose own work is not counted and has lower priority, alternate with blocks
during which nothing is copied.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

DEVICES = 2
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil  # noqa: E402
from object_servers import s3_server  # noqa: E402
from saving_cost import Timed  # noqa: E402
from turns import ratio, table  # noqa: E402

from launcher.checkpoint.layout import checksums, files_below, write_checksums  # noqa: E402
from launcher.checkpoint.mirroring import Mirroring  # noqa: E402

MIB = 2**20


def save(home: Path, step: int, mebibytes: int) -> None:
    """Write a checkpoint of that size."""
    root = home / "checkpoints" / str(step)
    partial = root.with_name(f"{step}.partial-x")
    partial.mkdir(parents=True)
    for part in range(mebibytes // 32):
        (partial / str(part)).write_bytes(os.urandom(32 * MIB))
    write_checksums(partial, step, checksums(partial, files_below(partial)))
    partial.rename(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=4, help="of each kind")
    parser.add_argument("--every", type=int, default=6, help="steps a block")
    parser.add_argument("--mebibytes", type=int, default=256, help="of a checkpoint")
    args = parser.parse_args()
    timed, lines = Timed(), []
    wall: dict[bool, list[float]] = {True: [], False: []}
    used: dict[bool, list[float]] = {True: [], False: []}
    with s3_server() as server, tempfile.TemporaryDirectory() as folder:
        for process in psutil.Process().children():
            process.nice(19)
        os.environ |= {**server.environ(), "NO_PROXY": "127.0.0.1"}
        home = Path(folder)
        mirroring = Mirroring(f"{server.bucket}/a", home, "a/b", 1, lines.append)
        timed.block(3, None)
        for block in range(1, 2 * args.blocks + 1):
            copies = block % 2 == 0
            if copies:
                save(home, block, args.mebibytes)
            began = time.process_time()
            _, _, steps = timed.block(args.every, None)
            used[copies].append((time.process_time() - began) / args.every)
            wall[copies].append(statistics.median(steps))
            while mirroring.mirrored < block - block % 2:  # what is left of the copy
                time.sleep(0.1)
        mirroring.kill()
    timed.worker.close()
    assert not lines, lines
    rows = [
        (name, statistics.median(wall[kind]) * 1e3, statistics.median(used[kind]) * 1e3)
        for name, kind in (("nothing is copied", False), ("a checkpoint is copied", True))
    ]
    table(("", "ms a step", "ms of processor time"), rows)
    more = [f"{ratio(each[True], each[False]) - 1:+.1%}" for each in (wall, used)]
    print(f"a copy costs {more[0]} of a step's time, {more[1]} of its processor time")


if __name__ == "__main__":
    main()
