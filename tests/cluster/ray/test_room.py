"""What a machine has to have before Ray is started: each lack is one line, at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import launcher
from launcher.base.cache_folder import cache_folder
from launcher.cluster.errors import ClusterError
from launcher.cluster.ray import room

PROGRAM = """
import sys
from launcher.cluster.errors import ClusterError
from launcher.cluster.ray.scratch import create
try:
    made = create()
    made.remove()
    print("made in", made.path.parent)
except ClusterError as error:
    sys.exit(f"refused: {error}")
"""


def made(before: str, **variables: str) -> str:
    """What comes of making a scratch folder after some lines of shell, in a mount namespace."""
    environ = os.environ | {"PYTHONPATH": str(Path(launcher.__file__).parents[1])} | variables
    script = f'{before}; exec "$0" -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    run = subprocess.run(
        [*command, sys.executable, PROGRAM], env=environ, capture_output=True, text=True
    )
    if "unshare" in run.stderr or "mount:" in run.stderr:
        pytest.skip(f"no namespaces here: {run.stderr.strip()}")
    return run.stdout + run.stderr


def test_too_few_open_files_are_refused():
    told = "refused: A process may open only 64 files here, and Ray needs 256: raise the limit"
    assert made("ulimit -n 64").startswith(told)


def test_a_soft_limit_is_raised():
    assert made("ulimit -S -n 64; export TMPDIR=/tmp") == "made in /tmp\n"


def test_shared_memory_that_cannot_be_written_is_refused():
    told = "refused: /dev/shm cannot be written, and Ray's processes share memory there"
    assert made("mount -t tmpfs -o ro none /dev/shm").startswith(told)


def test_a_temporary_folder_without_room_for_files_is_refused():
    few = "mount -t tmpfs -o nr_inodes=20 none /mnt; export TMPDIR=/mnt"
    assert made(few).startswith("refused: /mnt has room for only")


def test_a_full_temporary_folder_is_refused():
    full = "mount -t tmpfs -o size=1m none /mnt; export TMPDIR=/mnt"
    assert made(full).startswith("refused: /mnt is full (df /mnt), and Ray needs 32 MiB there")


def test_a_folder_that_ray_cannot_spell_is_passed_over():
    other = "mount -t tmpfs none /mnt; mkdir /mnt/ä; export TMPDIR=/mnt/ä"
    assert made(other) == "made in /tmp\n"


def test_a_user_without_name_and_home_has_no_cache(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it does for such a user
    assert str(cache_folder()) == "/nonexistent/.cache/launcher"


def test_a_machine_without_shared_memory_is_left_to_ray(tmp_path):
    room.check_shared_memory(tmp_path / "none")


def test_the_least_is_said(tmp_path):
    with pytest.raises(ClusterError, match=f"^{tmp_path} has room for only .* needs 10{'0' * 18}"):
        room.check_disk(tmp_path, least_inodes=10**19)


def test_the_object_store_may_take_half_of_the_memory_that_can_be_shared(monkeypatch, tmp_path):
    assert room.store_bytes(tmp_path / "none") == room.STORE_BYTES
    for free, taken in [(1 << 20, room.STORE_BYTES), (4 << 30, 2 << 30), (1 << 40, 16 << 30)]:
        disk = type("Disk", (), {"f_bavail": free // 4096, "f_frsize": 4096})
        monkeypatch.setattr(os, "statvfs", lambda _, disk=disk: disk)
        assert room.store_bytes(tmp_path) == taken
