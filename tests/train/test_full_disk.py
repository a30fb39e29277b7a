"""A full or read-only disk: the last good checkpoint stays, one line says what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OWN_MOUNTS = ["unshare", "--map-root-user", "--mount"]


def test_a_full_and_a_read_only_disk(tmp_path):
    if subprocess.run([*OWN_MOUNTS, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system gives no user a mount of his own")
    script = f'mount -t tmpfs -o size=4m none "{tmp_path}" && exec "{sys.executable}" "$@"'
    command = [*OWN_MOUNTS, "sh", "-c", script, "sh", HERE / "full_disk.py", tmp_path]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    folder = tmp_path / "checkpoints"
    assert json.loads(done.stdout) == [
        f"cannot save step 2 in {folder}: No space left on device. Free some space there, or keep "
        "fewer states (train.checkpoint.keep).",
        f"cannot save step 3 in {folder}: Read-only file system. Make it writable, or choose "
        "another run.dir.",
    ]
