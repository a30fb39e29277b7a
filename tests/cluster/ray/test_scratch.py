"""The temporary folder of a session: private, short, and swept once its owner is dead."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import launcher
from launcher.base.measurements import cache_folder
from launcher.cluster.errors import ClusterError
from launcher.cluster.ray import scratch
from launcher.cluster.ray.head import RAY_FOLDER

LONG_AGO = (0, 0)


@pytest.fixture
def base(monkeypatch):
    """A short base folder of the test's own."""
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder


def test_the_folder_is_private_and_short_enough_for_sockets(base):
    folder = scratch.create()
    assert str(folder.path.parent) == base
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    session = f"{RAY_FOLDER}/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
    assert len(os.fsencode(folder.path / session)) <= 107
    folder.remove()
    assert os.listdir(base) == []


def test_a_long_base_is_passed_over_for_a_short_one(tmp_path):
    long = tmp_path / ("x" * 80)
    long.mkdir()
    assert str(scratch.choose_base((str(long), "/tmp"))) == "/tmp"
    with pytest.raises(ClusterError, match=r"Set TMPDIR to .* at most \d+ characters"):
        scratch.choose_base((str(long), "/nonexistent"))


@pytest.mark.parametrize(("mode", "safe"), [(0o700, True), (0o1777, True), (0o777, False)])
def test_a_base_where_others_could_put_a_folder_of_theirs_in_our_place_is_passed_over(
    mode, safe, base
):
    os.chmod(base, mode)
    inside = os.path.join(base, "t")
    os.mkdir(inside)
    for candidate in (base, inside):
        assert str(scratch.choose_base((candidate, "/tmp"))) == (candidate if safe else "/tmp")


def test_a_link_that_somebody_may_turn_is_not_kept(base):
    os.mkdir(os.path.join(base, "there"))
    link = os.path.join(base, "link")
    os.symlink("there", link)
    assert str(scratch.choose_base((link,))) == os.path.join(base, "there")


def test_a_dead_owner_s_folder_is_swept_and_a_living_one_s_is_not(base):
    living, dead = scratch.create(), scratch.create()
    os.close(dead.lock)  # what the kernel does when the owner ends
    for folder in (living, dead):
        os.utime(folder.path, LONG_AGO)
    fresh = scratch.create()  # sweeps
    assert living.path.exists()
    assert not dead.path.exists()
    fresh.remove()
    living.remove()


def test_only_old_folders_of_ours_are_swept(base):
    """Also one that was never locked, which is empty."""
    starting = scratch.create()
    os.close(starting.lock)  # young: it may be about to be locked
    for name in ("launcher-notes", "launcher-datasets/mine", "launcher-_0ab_1cd"):
        os.makedirs(os.path.join(base, name))  # old, but with no lock in it
    for name in os.listdir(base):
        if name != starting.path.name:
            os.utime(os.path.join(base, name), LONG_AGO)
    scratch.sweep(starting.path.parent)
    assert {*os.listdir(base)} == {starting.path.name, "launcher-notes", "launcher-datasets"}


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


def made(before: str) -> str:
    """What comes of making a scratch folder after some lines of shell, in a mount namespace."""
    environ = os.environ | {"PYTHONPATH": str(Path(launcher.__file__).parents[1])}
    script = f'{before}; exec "$0" -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    run = subprocess.run(
        [*command, sys.executable, PROGRAM], env=environ, capture_output=True, text=True
    )
    if "unshare" in run.stderr or "mount:" in run.stderr:
        pytest.skip(f"no namespaces here: {run.stderr.strip()}")
    return run.stdout + run.stderr


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (
            "ulimit -n 64",
            "refused: A process may open only 64 files here, and Ray needs 256: raise the limit",
        ),
        ("ulimit -S -n 64; export TMPDIR=/tmp", "made in /tmp\n"),  # a soft limit is raised
        (
            "mount -t tmpfs -o ro none /dev/shm",
            "refused: /dev/shm cannot be written, and Ray's processes share memory there",
        ),
        (
            "mount -t tmpfs -o nr_inodes=20 none /mnt; export TMPDIR=/mnt",
            "refused: /mnt has room for only",
        ),
        (
            "mount -t tmpfs -o size=1m none /mnt; export TMPDIR=/mnt",
            "refused: /mnt is full (df /mnt), and Ray needs 32 MiB there",
        ),
        # A folder that Ray cannot spell is passed over.
        ("mount -t tmpfs none /mnt; mkdir /mnt/ä; export TMPDIR=/mnt/ä", "made in /tmp\n"),
    ],
)
def test_a_machine_that_lacks_something_is_refused(before, told):
    assert made(before).startswith(told)


def test_a_user_without_name_and_home_has_no_cache(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it does for such a user
    assert str(cache_folder()) == "/nonexistent/.cache/launcher"


def test_a_machine_without_shared_memory_is_left_to_ray(tmp_path):
    scratch.check_shared_memory(tmp_path / "none")


def test_the_object_store_may_take_half_of_the_memory_that_can_be_shared(monkeypatch, tmp_path):
    assert scratch.store_bytes(tmp_path / "none") == scratch.STORE_BYTES
    for free, taken in [(1 << 20, scratch.STORE_BYTES), (4 << 30, 2 << 30), (1 << 40, 16 << 30)]:
        disk = type("Disk", (), {"f_bavail": free // 4096, "f_frsize": 4096})
        monkeypatch.setattr(os, "statvfs", lambda _, disk=disk: disk)
        assert scratch.store_bytes(tmp_path) == taken
