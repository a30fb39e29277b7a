"""A full or read-only disk: the last good checkpoint stays, one line says what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import checkpoint

HERE = Path(__file__).parent
OWN_MOUNTS = ["unshare", "--map-root-user", "--mount"]


def on_own_disk(script, *arguments):
    """Run a shell script that may mount file systems of its own, with `arguments`."""
    if subprocess.run([*OWN_MOUNTS, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system gives no user a mount of his own")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [*OWN_MOUNTS, "sh", "-c", script, "sh", *arguments]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_full_and_a_read_only_disk(tmp_path):
    script = f'mount -t tmpfs -o size=4m none "{tmp_path}" && exec "{sys.executable}" "$@"'
    done = on_own_disk(script, HERE / "full_disk.py", tmp_path)
    assert "Traceback" not in done.stderr
    folder = tmp_path / "checkpoints"
    assert json.loads(done.stdout) == [
        f"cannot save step 2 in {folder}: No space left on device. Free some space there, or keep "
        "fewer states (train.checkpoint.keep).",
        f"cannot save step 3 in {folder}: Read-only file system. Make it writable, or choose "
        "another run.dir.",
    ]


@pytest.mark.slow
def test_a_run_on_a_disk_that_fills_up_loses_nothing_and_goes_on_where_there_is_room(tmp_path):
    """The last save fails, and with it the run; all before it is kept, down to the metrics."""
    words = "recipe=smoke wandb.mode=disabled run.id=a train.steps=9 train.checkpoint.every_steps=1"
    script = f"""
        cd "{tmp_path}" && mkdir disk kept && mount -t tmpfs -o size=3m none disk || exit 9
        run() {{ "{sys.executable}" -m launcher run.dir=disk {words} >$1.out 2>$1.err; echo $?; }}
        run full
        cp -r disk/a/checkpoints kept
        mount -o remount,size=50m disk
        run room
        cp disk/a/metrics.jsonl kept
    """
    done = on_own_disk(script)
    assert done.stdout.split() == ["1", "0"], (tmp_path / "full.err").read_text()
    err = (tmp_path / "full.err").read_text()
    folder = f"{tmp_path}/disk/a/checkpoints"
    # Whether the few bytes of summary.json still found room is left to chance.
    *unrecorded, reason = err.splitlines()
    assert reason.startswith(f"launcher: cannot save step 9 in {folder}: No space"), err
    assert all("the end of the run is not recorded" in line for line in unrecorded), err
    assert len(unrecorded) <= 1, err
    said = (tmp_path / "full.out").read_text()
    assert "No space left on device. Free some space there" in said
    assert "Training continues." in said
    assert "Traceback" not in said
    last = checkpoint.newest(tmp_path / "kept" / "checkpoints")
    assert last.step in range(1, 9)
    assert last.damaged == ()
    again = (tmp_path / "room.out").read_text()
    assert f"resuming run a at step {last.step} from disk/a/checkpoints/{last.step}" in again
    lines = (tmp_path / "kept" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 10))
