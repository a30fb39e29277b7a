"""metrics.jsonl is valid JSON with every step once, whatever happened before."""

import errno
import json
import math
import os

import numpy as np
import pytest

from launcher.report.jsonl import JsonlTracker, read_metrics
from launcher.report.trackers.tracker import METRIC_KEYS


def write(path, steps, first_step=1):
    tracker = JsonlTracker(path, first_step)
    for step in steps:
        tracker.log(step, {"train/loss": float(step)})
    tracker.finish({})


def steps_in(path):
    return [record["step"] for record in read_metrics(path)]


def test_a_line_holds_the_contracts_keys_and_the_steps_own(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log(1, {"train/loss": 2.5, "eval/loss": 2.75, "perf/mfu": None})
    tracker.finish({})
    line = (tmp_path / "m.jsonl").read_text()
    assert line.endswith("}\n")
    assert list(json.loads(line)) == [*METRIC_KEYS, "eval/loss"]
    assert line.startswith('{"step": 1, "train/loss": 2.5, "train/grad_norm": null, ')


def test_a_line_is_in_the_file_before_the_next_step(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log(1, {})
    assert steps_in(tmp_path / "m.jsonl") == [1]
    tracker.log(2, {})
    assert steps_in(tmp_path / "m.jsonl") == [1, 2]
    tracker.finish({})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_what_is_not_finite_is_null(tmp_path, value):
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log(1, {"train/loss": value})
    tracker.finish({})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = (tmp_path / "m.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse)["train/loss"] is None


def test_numbers_of_any_float_kind_are_written(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log(1, {"train/loss": np.float32(0.5), "perf/peak_memory_bytes": 1 << 40})
    tracker.finish({})
    [record] = read_metrics(tmp_path / "m.jsonl")
    assert (record["train/loss"], record["perf/peak_memory_bytes"]) == (0.5, 1 << 40)


def test_resuming_drops_the_steps_that_are_run_again(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, range(1, 8))
    write(path, range(5, 10), first_step=5)
    assert steps_in(path) == list(range(1, 10))


def test_starting_over_leaves_nothing_of_before(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, range(1, 4))
    write(path, [1])
    assert steps_in(path) == [1]


@pytest.mark.parametrize("torn", [b'{"step": 4, "train/lo', b'{"step": 4}', b"\0\0\0\n"])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    write(path, [1, 2, 3])
    with open(path, "ab") as file:
        file.write(torn)
    assert steps_in(path) == [1, 2, 3]
    write(path, [4, 5], first_step=4)
    assert steps_in(path) == [1, 2, 3, 4, 5]


def test_no_file_is_no_metrics(tmp_path):
    assert read_metrics(tmp_path / "m.jsonl") == []


def test_what_waits_for_room_outlives_a_rewind(tmp_path, caplog):
    """Steps 2 and 3 find no room, of step 2 a part does; the run then goes on at step 3."""
    path = tmp_path / "m.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {})
    file = tracker._file
    tracker._file = NearlyFull(file, room=9)
    tracker.log(2, {})
    tracker.log(3, {})
    tracker.sync()
    tracker.rewind(3)
    assert steps_in(path) == [1]
    assert len(caplog.messages) == 1
    tracker._file = file
    tracker.log(3, {"train/loss": 0.5})
    tracker.finish({})
    assert [(r["step"], r["train/loss"]) for r in read_metrics(path)] == [
        (1, None),
        (2, None),
        (3, 0.5),
    ]


class NearlyFull:
    """A file whose disk has room for so many bytes more, and then answers with `code`."""

    def __init__(self, file, room, code=errno.ENOSPC):
        self._file, self._room, self._code = file, room, code
        self.truncate, self.fileno = file.truncate, file.fileno
        self.seek, self.read, self.closed = file.seek, file.read, False

    def write(self, data):
        if not self._room:
            raise OSError(self._code, os.strerror(self._code))
        taken = self._file.write(data[: self._room])
        self._room -= taken
        return taken


def test_a_sync_puts_what_is_logged_on_the_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda number: synced.append(os.fstat(number)) or fsync(number)
    )
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log(1, {})
    tracker.sync()
    assert synced == [os.stat(tmp_path / "m.jsonl")]


@pytest.mark.parametrize("bad", [b"\0\0\0\n", b'{"step": null}\n', b'{"step": 2, "tr\n', b"7\n"])
def test_a_bad_line_in_the_middle_costs_no_other_line_and_is_kept_beside(tmp_path, bad, caplog):
    path = tmp_path / "m.jsonl"
    write(path, [1, 2, 3])
    first, *others = path.read_bytes().splitlines(keepends=True)
    damaged = b"".join([first, bad, *others])
    path.write_bytes(damaged)
    assert steps_in(path) == [1, 2, 3]
    tracker = JsonlTracker(path, 3)
    tracker.log(3, {})
    tracker.finish({})
    lines = path.read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert caplog.messages == [
        f"{path}: line 2 cannot be read and is left out; see m.jsonl.damaged"
    ]
    assert (tmp_path / "m.jsonl.damaged").read_bytes() == damaged


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES])
def test_lines_wait_for_a_disk_that_takes_nothing_for_a_while(tmp_path, code, caplog):
    path = tmp_path / "m.jsonl"
    tracker = JsonlTracker(path)
    file = tracker._file
    tracker._file = NearlyFull(file, room=0, code=code)
    tracker.log(1, {})
    tracker.log(2, {})
    tracker.sync()
    assert caplog.messages == [f"{path}: {os.strerror(code)}; metrics wait until it can be written"]
    tracker._file = file
    tracker.log(3, {})
    tracker.finish({})
    assert steps_in(path) == [1, 2, 3]
