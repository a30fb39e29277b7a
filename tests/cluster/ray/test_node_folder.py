"""A file that another node writes here: whole with its header, or not there, at any cut."""

import os
from pathlib import Path

import numpy as np
import pytest

from launcher.cluster.ray import node_folder
from launcher.cluster.ray.node_folder import write_file_part

OLDEST, OLD, NEW = "copy.3.0", "copy.4.0", "copy.5.0"
BYTES = np.arange(100, dtype=np.uint8)
PART = [(0, BYTES[:40]), (64, BYTES[40:])]


class Cut(BaseException):
    """The end of the process."""


@pytest.fixture
def folder(tmp_path):
    for name, header in ((OLDEST, b"oldest"), (OLD, b"old")):
        write_file_part(str(tmp_path), name, PART, header)
    return tmp_path


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_a_file_takes_the_place_of_the_oldest(folder):
    (folder / "share.0").touch()
    assert write_file_part(str(folder), NEW, PART, b"new") > 0
    assert names(folder) == {"share.0", OLD, f"{OLD}.json", NEW, f"{NEW}.json"}
    assert (folder / f"{NEW}.json").read_bytes() == b"new"
    assert (folder / NEW).read_bytes() == bytes([*range(40), *[0] * 24, *range(40, 100)])
    assert (folder / NEW).stat().st_mode & 0o777 == 0o600


def test_one_of_several_parts_never_has_memory_beside_two_others(folder):
    write_file_part(str(folder), NEW, PART[:1], None)
    assert names(folder) == {OLD, f"{OLD}.json", NEW}
    write_file_part(str(folder), NEW, PART[1:], b"new")
    assert names(folder) == {OLD, f"{OLD}.json", NEW, f"{NEW}.json"}


@pytest.mark.parametrize("where", ["open", "pwrite", "write_bytes", "replace"])
@pytest.mark.parametrize("name", [OLD, NEW])
def test_one_that_is_cut_has_no_header_and_the_one_before_stays(folder, monkeypatch, where, name):
    def cut(*arguments):
        raise Cut

    owner = os if where in ("open", "pwrite") else Path
    with monkeypatch.context() as patch:
        patch.setattr(owner, where, cut)
        with pytest.raises(Cut):
            write_file_part(str(folder), name, PART, b"new")
    headers = {each for each in names(folder) if each.endswith(".json")}
    before = OLDEST if name == OLD else OLD
    assert headers == {f"{before}.json"}
    write_file_part(str(folder), name, PART, b"new")
    assert names(folder) == {before, f"{before}.json", name, f"{name}.json"}


def test_a_folder_that_is_gone_stays_gone(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_file_part(str(tmp_path / "gone"), NEW, PART, b"new")
    assert names(tmp_path) == set()


def test_the_niceness_is_of_the_thread_that_writes_alone(folder, monkeypatch):
    seen, pwrite = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: seen.append(os.nice(0)) or pwrite(*args))
    write_file_part(str(folder), NEW, PART, b"new")
    assert min(seen) > os.nice(0)


def test_long_values_are_sent_in_parts(monkeypatch):
    monkeypatch.setattr(node_folder, "_PART", 40)
    parts = node_folder._parts([(0, BYTES[:30]), (64, BYTES), (192, BYTES[:5])])
    found = [[(start, value.size) for start, value in part] for part in parts]
    assert found == [[(0, 30)], [(64, 40)], [(104, 40)], [(144, 20), (192, 5)]]
    joined = [value for part in parts for _, value in part]
    np.testing.assert_array_equal(np.concatenate(joined), [*range(30), *range(100), *range(5)])
