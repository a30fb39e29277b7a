"""What a mirror costs: processor time and time of a step beside its process, and without it.

    python tests/benchmarks/mirror_cost.py [--pairs 100] [--steps 2]

Two processors train all the time. In one of a pair of short blocks of steps the process copies a
checkpoint to a server on this machine, in the other both are halted; which comes first alternates.
The server, whose work would be another machine's, gets what is left of the processors (SCHED_IDLE),
and that is not counted.

It prints the median of the pairs' ratios with its 95 % confidence interval; first for processor
time, which tells more on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import signal
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
from turns import more, table  # noqa: E402

from launcher.checkpoint.layout import checksums, files_below, write_checksums  # noqa: E402
from launcher.checkpoint.mirroring import Mirroring  # noqa: E402

MIB = 2**20
_FILE = 32  # MiB


class Copying:
    """A mirror that has a checkpoint to copy all the time; it can be halted, with its server."""

    def __init__(self, url: str, home: Path, server: psutil.Process, mebibytes: int) -> None:
        for thread in server.threads():  # those that it begins later are alike
            os.sched_setscheduler(thread.id, os.SCHED_IDLE, os.sched_param(0))
        self._home, self._server, self._step = home, server, 0
        self._parts, self._size = home / "parts", mebibytes // _FILE * _FILE
        self._parts.mkdir()
        for part in range(mebibytes // _FILE):
            (self._parts / str(part)).write_bytes(os.urandom(_FILE * MIB))
        self._sums = checksums(self._parts, files_below(self._parts))
        self.lines: list[str] = []
        self._mirroring = Mirroring(url, home, "a/b", 1, self.lines.append)

    @property
    def is_under_way(self) -> bool:
        """Whether the newest checkpoint is not there yet."""
        return not self._mirroring.mirrored

    @property
    def copied(self) -> float:
        """The MiB that were copied."""
        done, _ = self._mirroring.progress or (0, 0)
        return (self._step - 1) * self._size + done / MIB

    def go_on(self) -> None:
        """Copy on, or the next checkpoint."""
        if self._mirroring.mirrored == self._step:
            before = self._mirroring._process
            self._save()
            while self._mirroring._process is before:
                time.sleep(0.01)
        assert not self.lines, self.lines
        self._send(signal.SIGCONT)

    def halt(self) -> None:
        """Stop until it is to go on."""
        self._send(signal.SIGSTOP)

    def end(self) -> None:
        """End the process."""
        self._server.send_signal(signal.SIGCONT)
        self._mirroring.kill()

    def _save(self) -> None:
        """Save the same files as another checkpoint, by links: steps wait for no disk."""
        self._step += 1
        root = self._home / "checkpoints" / str(self._step)
        partial = root.with_name(f"{self._step}.partial-x")
        partial.mkdir(parents=True)
        for part in self._parts.iterdir():
            os.link(part, partial / part.name)
        write_checksums(partial, self._step, self._sums)
        partial.rename(root)

    def _send(self, number: signal.Signals) -> None:
        self._server.send_signal(number)
        if self._mirroring._process:
            self._mirroring._process.send_signal(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100, help="of blocks")
    parser.add_argument("--steps", type=int, default=2, help="a block")
    parser.add_argument("--mebibytes", type=int, default=256, help="of a checkpoint")
    args = parser.parse_args()
    with s3_server() as server, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        [process] = psutil.Process().children()
        os.environ |= {**server.environ(), "NO_PROXY": "127.0.0.1"}
        timed = Timed()
        timed.block(5, None)
        copying = Copying(f"{server.bucket}/a", Path(folder), process, args.mebibytes)

        def block(copies: bool) -> tuple[float, float]:
            """The time and the processor time of a block's steps."""
            copying.go_on() if copies else copying.halt()
            began = time.process_time()
            _, _, steps = timed.block(args.steps, None)
            used = time.process_time() - began
            copying.halt()
            return sum(steps), used

        pairs: list[tuple[float, float, float, float]] = []
        while len(pairs) < args.pairs:
            found: dict[bool, tuple[float, float]] = {}
            for copies in (len(pairs) % 2 == 0, len(pairs) % 2 == 1):
                found[copies] = block(copies)
                if copies and not copying.is_under_way:  # it has ended in this block
                    break
            else:
                pairs.append((*found[True], *found[False]))
        copied = copying.copied
        copying.end()
        timed.worker.close()
    if copied < 1:
        sys.exit("nothing was copied: other processes leave the server nothing of the processors")
    wall, used, plain_wall, plain_used = zip(*pairs, strict=True)
    rows = [
        (name, *(statistics.median(each) * 1e3 / args.steps for each in kinds))
        for name, kinds in (
            ("nothing is copied", (plain_wall, plain_used)),
            (f"{copied / sum(wall):.0f} MiB/s are copied", (wall, used)),
        )
    ]
    table(("", "ms a step", "ms of processor time"), rows)
    print(f"a copy costs {more(used, plain_used)} of a step's processor time,")
    print(f"and {more(wall, plain_wall)} of its time")


if __name__ == "__main__":
    main()
