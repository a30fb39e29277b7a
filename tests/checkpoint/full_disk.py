"""What happens on a disk that is full, or read-only; `test_full_disk` runs it with such a one.

    python full_disk.py FOLDER

FOLDER is a small file system of its own, which the caller may remount.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp

from launcher import checkpoint
from launcher.base.files import write_whole
from launcher.base.output import lines_to
from launcher.checkpoint.train_state import TrainState
from launcher.report.jsonl import JsonlTracker

DISK = Path(sys.argv[1])
FOLDER = DISK / "checkpoints"


def save(step, size):
    state = TrainState(jnp.int32(step), {"w": jnp.ones(size)}, {}, jnp.zeros(2, jnp.uint32))
    checkpoint.save(FOLDER, step, checkpoint.copy_to_host(state), {}, keep=1)


def refused(step, size):
    """What a save that fails says; it leaves nothing but what was there."""
    before = sorted(DISK.rglob("*"))
    try:
        save(step, size)
    except checkpoint.SaveError as error:
        assert sorted(DISK.rglob("*")) == before
        assert checkpoint.newest(FOLDER) == checkpoint.NewestIntact(1)
        return str(error)
    raise AssertionError("it was saved")


def metrics():
    """Lines that find no room are held back, and none is lost."""
    warnings = []
    tracker = JsonlTracker(DISK / "metrics.jsonl")
    ballast = DISK / "ballast"
    try:
        with open(ballast, "wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
    except OSError:
        pass
    with lines_to(warnings.append):
        for step in range(1, 100):  # more than fit in the last block
            tracker.log(step, {"train/loss": 1.0})
    assert warnings == [
        f"{DISK}/metrics.jsonl: No space left on device; metrics wait until there is room"
    ]
    try:
        write_whole(DISK / "summary.json", "x" * 10_000)
    except OSError as error:
        named = error.filename
    assert named == f"{DISK}/summary.json"
    ballast.unlink()
    tracker.log(100, {"train/loss": 1.0})
    tracker.finish({})
    lines = (DISK / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 101))


save(1, 1000)
full = refused(2, 4_000_000)
metrics()
subprocess.run(["mount", "-o", "remount,ro", str(DISK)], check=True)
read_only = refused(3, 1000)
subprocess.run(["mount", "-o", "remount,rw", str(DISK)], check=True)
save(4, 1000)
assert checkpoint.newest(FOLDER) == checkpoint.NewestIntact(4)
print(json.dumps([full, read_only]))
