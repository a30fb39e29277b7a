"""`metrics.jsonl`: one JSON object a logged step, written and read here and nowhere else.

Every line holds every key of `METRIC_KEYS`, then the step's own extra ones. What is unknown and
what is not finite (NaN, infinity) is `null`: that is valid JSON, and every reader keeps the column
numeric.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from launcher.files import (
    FULL,
    DamagedError,
    aside,
    named,
    open_own,
    parse_json,
    read_bytes,
    say_aside,
)
from launcher.report.tracker import METRIC_KEYS, Metrics, Tracker

METRICS = "metrics.jsonl"  # in the folder of a run
# What may pass: there is room again, or the disk is mounted as it was.
_PASSING = FULL | {errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES}
_LARGEST = 2**53  # of a step: what every reader of JSON takes for itself
_LARGEST_METRIC = 1.8e308  # that a float holds


class JsonlTracker(Tracker):
    """Appends to `path`, one flushed line a step, so that a crash costs no line but its own.

    Opening it for a run that goes on at `first_step` drops the lines of that step and later, and a
    last line that a crash tore: every step stands in the file once. Other lines that are not whole
    go too, but `warn` is told and the old file is kept beside. `rewind` does the same later.

    While the disk is full or takes nothing for another reason, lines are held back and written when
    it does again; `warn` is told. The constructor, `log`, `sync` and, of a disk that still takes
    nothing, `finish` raise OSError where the file cannot be written.
    """

    def __init__(
        self, path: Path, first_step: int = 1, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        self._path, self._warn = path, warn
        self._file = self._opened()
        self._held_back = b""
        self._waiting = False
        self.rewind(first_step)

    def _opened(self) -> BinaryIO:
        descriptor = open_own(self._path, os.O_RDWR | os.O_APPEND, self._warn)
        return open(descriptor, "a+b", buffering=0)

    def _written(self) -> bytes:
        """What the file holds, also where its name is gone."""
        self._file.seek(0)
        return self._file.read()

    def rewind(self, first_step: int) -> None:
        """Drop the lines of `first_step` and later, written or held back."""
        self._try(self._ensure_named)
        written = self._written()
        lines = (written + self._held_back).splitlines(keepends=True)  # one may be in both
        records = [_record(line) for line in lines]
        if bad := [n for n, record in enumerate(records[:-1], 1) if record is None]:
            self._keep_beside(bad)
        before = [record is not None and record["step"] < first_step for record in records]
        same = before.index(False) if False in before else len(lines)
        end = min(sum(map(len, lines[:same])), len(written))
        self._held_back = b"".join(itertools.compress(lines, before))[end:]
        if end < len(written):
            self._file.truncate(end)
        self._try(self._write)

    def _keep_beside(self, bad: list[int]) -> None:
        """Copy the file, of which the lines of these numbers are to go, and say so."""
        kept = aside(self._path)
        shutil.copy(self._path, kept)
        which = f"line {bad[0]}" + (f" and {len(bad) - 1} more" if bad[1:] else "")
        self._warn(f"{self._path}: {which} cannot be read and is left out; see {kept.name}")

    def records(self) -> list[dict[str, Any]]:
        """The steps that are in the file, like `read_metrics`."""
        return _records(self._written())

    def move(self, path: Path) -> None:
        """From now on the file is `path`: its folder was renamed, or is made again."""
        self._path = path

    def _ensure_named(self) -> None:
        """Write the file again where it was deleted, or something else stands in its place."""
        try:
            if os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return
            say_aside(self._path, "it was put in the place of this run's own", self._warn)
        except FileNotFoundError:
            pass
        before, written = self._file, self._written()
        self._file = self._opened()
        before.close()
        self._held_back = written + self._held_back
        self._warn(f"{self._path} was taken away while the run trained: it is written again")

    def log(self, step: int, metrics: Metrics) -> None:
        known = {"step": step, **metrics}
        line = {key: json_number(known.get(key)) for key in (*METRIC_KEYS, *known)}
        self._held_back += json.dumps(line, allow_nan=False).encode() + b"\n"
        self._try(self._write)

    def sync(self) -> None:
        """Wait until what is logged is on the disk, as far as that has room."""
        self._try(self._ensure_named)
        self._try(self._write)
        self._try(lambda: os.fsync(self._file.fileno()))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            if not self._waiting:
                until = "there is room" if error.errno in FULL else "it can be written"
                self._warn(f"{self._path}: {error.strerror}; metrics wait until {until}")
            self._waiting = True

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            self._ensure_named()
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        try:
            while self._held_back:  # a disk that is nearly full takes a part
                self._held_back = self._held_back[self._file.write(self._held_back) :]
        except OSError as error:
            raise named(error, self._path) from None
        self._waiting = False


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The logged steps of a `metrics.jsonl`, oldest first, without lines that are not whole; none
    where there is no such file yet. Raises OSError."""
    try:
        return _records(read_bytes(path, most=_LARGEST))
    except (FileNotFoundError, DamagedError):
        return []


def _records(data: bytes) -> list[dict[str, Any]]:
    lines = data.splitlines(keepends=True)
    return [record for line in lines if (record := _record(line)) is not None]


def json_number(value: float | None) -> float | int | None:
    """`value` as JSON can hold it: not-finite becomes None, and any float kind a Python float."""
    if value is None or isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


def _record(line: bytes) -> dict[str, Any] | None:
    """What a line holds; None where it is not whole, or no step's metrics."""
    try:
        record = parse_json(line)
    except DamagedError:
        return None
    if not isinstance(record, dict) or not line.endswith(b"\n"):
        return None
    step = record.get("step")
    is_step = type(step) is int and 0 < step < _LARGEST
    return record if is_step and all(map(_is_metric, record.values())) else None


def _is_metric(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) < _LARGEST_METRIC)
