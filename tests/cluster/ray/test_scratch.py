"""The temporary folder of a session: private, short, and swept once its owner is dead."""

import os
import stat
import tempfile

import pytest

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


def test_without_a_usable_base_the_error_says_how_long_one_may_be(tmp_path):
    long = tmp_path / ("x" * 80)
    long.mkdir()
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
