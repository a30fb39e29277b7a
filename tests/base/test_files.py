"""Small files: written whole and synced, read strictly, and set aside where they are damaged."""

import os
import stat
from pathlib import Path

import pytest

from launcher.base.files import (
    DamagedError,
    clear_partial,
    missing_path,
    open_own,
    open_regular,
    parse_json,
    read_json,
    read_own,
    read_text,
    write_whole,
)
from launcher.cluster.errors import last_lines


def test_a_file_is_private_whole_and_on_the_disk_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = [], os.fsync

    def note(descriptor: int) -> None:
        synced.append(stat.S_IFMT(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    path = tmp_path / "job.json"
    path.symlink_to(tmp_path / "elsewhere")  # what somebody planted is replaced, not followed
    write_whole(path, "text", private=True)
    assert not path.is_symlink()
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("text", 0o600)
    assert synced == [stat.S_IFREG, stat.S_IFDIR]
    before = os.umask(0o027)
    try:
        write_whole(path, "other")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["job.json"]


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.json"
    write_whole(path, "before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as raised:
        write_whole(path, "after")
    assert raised.value.filename == str(path)
    assert (os.listdir(tmp_path), path.read_text()) == (["job.json"], "before")


def test_what_a_killed_write_left_is_cleared_once_nobody_can_be_writing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", lambda *_: None)  # as where it is killed before
    for name in ("new", "old"):
        write_whole(tmp_path / name, "secret")
    (tmp_path / "notes.partial").touch()
    (new,) = tmp_path.glob("new*")
    for path in {*tmp_path.iterdir()} - {new}:
        os.utime(path, (0, 0))
    clear_partial(tmp_path)
    assert {*tmp_path.iterdir()} == {new, tmp_path / "notes.partial"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "it is not JSON"),
        (b'{"a": ', "it is not JSON"),
        (b"NaN", "it is not JSON"),
        (b"[1e999]", "it holds a number that is not finite"),
        (b"9" * 5000, "it is not JSON"),
        (b'{"a": "\\ud800"}', "it holds text with invalid characters"),
        (b'{"a\\u0000": 1}', "it holds text with invalid characters"),
        (b"[" * 200 + b"]" * 200, "it is nested too deeply"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"a":' * 100_000, "it is nested too deeply"),
    ],
)
def test_json_that_nobody_here_wrote_is_named_in_a_line(text: bytes, told: str) -> None:
    with pytest.raises(DamagedError) as raised:
        parse_json(text)
    assert str(raised.value).startswith(told)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_file_is_not_waited_for(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "job.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    for door in (read_text, read_json, lambda path: open_regular(path, os.O_WRONLY)):
        with pytest.raises(DamagedError, match="it is not a regular file"):
            door(path)
    assert read_own(path, lambda tree: tree) is None
    kept = "it is not a regular file; it is kept as job.json.damaged"
    assert caplog.messages == [f"{path} is damaged and not used: {kept}"]
    assert os.listdir(tmp_path) == ["job.json.damaged"]


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_what_stands_in_the_place_of_a_file_to_write_is_set_aside(
    kind: str, tmp_path: Path
) -> None:
    path, other = tmp_path / "ray.log", tmp_path / "other"
    other.write_text("mine")
    path.symlink_to(other) if kind == "link" else os.mkfifo(path)
    assert last_lines(path) == ""
    for _ in range(2):
        with open(open_own(path, os.O_WRONLY | os.O_APPEND), "w") as file:
            file.write("line\n")
    assert (last_lines(path), other.read_text()) == ("line\nline", "mine")
    assert os.path.lexists(tmp_path / "ray.log.damaged")


def test_what_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    with open(path, "wb") as file:
        file.truncate(2**40)  # which takes no room
    with pytest.raises(DamagedError, match=r"it is larger than 134,217,728 bytes"):
        read_json(path)


def test_a_damaged_file_costs_none_that_was_set_aside_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "job.json"
    for text in ("one", "two"):
        path.write_text(text)
        assert read_own(path, lambda tree: tree) is None
    assert (tmp_path / "job.json.damaged").read_text() == "one"
    assert (tmp_path / "job.json.damaged-2").read_text() == "two"
    assert len(caplog.messages) == 2


def test_what_does_not_exist_is_said_with_what_was_meant(tmp_path):
    (tmp_path / "chats.jsonl").touch()
    near = tmp_path / "chat.jsonl"
    assert missing_path(near) == f"does not exist ({tmp_path / 'chats.jsonl'} does)"
    assert missing_path(tmp_path / "pictures") == "does not exist"
    assert missing_path(tmp_path / "none" / "x") == "does not exist"
    (tmp_path / "link").symlink_to("nowhere")
    assert missing_path(tmp_path / "link") == "does not exist"
