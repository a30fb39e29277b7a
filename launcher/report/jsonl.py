"""`metrics.jsonl`: one JSON object a logged step.

Every line holds every key of `METRIC_KEYS`, then the step's own extra ones. Values that are unknown
or not finite (NaN, infinity) are `null`: that is valid JSON, and every reader keeps the column
numeric.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from launcher.base import (
    FULL,
    DamagedError,
    aside,
    named,
    open_own,
    parse_json,
    read_bytes,
    set_aside,
)
from launcher.report.trackers.tracker import METRIC_KEYS, Metrics, Tracker

METRICS = "metrics.jsonl"  # in the folder of a run
# Errors that may pass: the disk has room again, or is mounted again.
_PASSING = FULL | {errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES}
_LARGEST = 2**53  # no step is larger: every JSON reader holds such integers exactly
_LARGEST_METRIC = 1.8e308  # that a float holds

_log = logging.getLogger(__name__)


class JsonlTracker(Tracker):
    """Appends to a file, one flushed line a step, so that a crash loses no line but its own.

    Opening the file for a run that continues at `first_step` drops the lines of that step and later
    ones, and a last line that a crash cut off: every step is in the file once. Other incomplete
    lines are dropped as well, with a warning, and the old file is kept beside the new one. `rewind`
    does the same later.

    While the disk is full or cannot be written for another passing reason, lines are held back and
    written when it can be written again, with a warning.

    Args:
        path: the file.
        first_step: the first step to be logged.

    Raises:
        OSError: the file cannot be written. So do `log`, `sync` and, where lines are still held
            back, `finish`.
    """

    def __init__(self, path: Path, first_step: int = 1) -> None:
        self._path = path
        self._file = self._opened()
        self._held_back = b""
        self._waiting = False
        self.rewind(first_step)

    def _opened(self) -> BinaryIO:
        descriptor = open_own(self._path, os.O_RDWR | os.O_APPEND)
        return open(descriptor, "a+b", buffering=0)

    def _written(self) -> bytes:
        """Return the content of the file, even if its name is gone."""
        self._file.seek(0)
        return self._file.read()

    def rewind(self, first_step: int) -> None:
        """Drop the lines of `first_step` and later ones, written or held back."""
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
        """Keep a copy of the file before the lines of these numbers are dropped, and warn."""
        kept = aside(self._path)
        shutil.copy(self._path, kept)
        which = f"line {bad[0]}" + (f" and {len(bad) - 1} more" if bad[1:] else "")
        _log.warning(f"{self._path}: {which} cannot be read and is left out; see {kept.name}")

    def records(self) -> list[dict[str, Any]]:
        """Return the steps in the file, like `read_metrics`."""
        return _records(self._written())

    def move(self, path: Path) -> None:
        """Take `path` for the file's name from now on: its folder was renamed or made again."""
        self._path = path

    def _ensure_named(self) -> None:
        """Write the file again where it was deleted or replaced by something else."""
        try:
            if os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return
            _log.warning(set_aside(self._path, "it replaced this run's own file"))
        except FileNotFoundError:
            pass
        before, written = self._file, self._written()
        self._file = self._opened()
        before.close()
        self._held_back = written + self._held_back
        _log.warning(f"{self._path} was removed while the run trained: it is written again")

    def log(self, step: int, metrics: Metrics) -> None:
        """Append the step's line."""
        known = {"step": step, **metrics}
        line = {key: json_number(known.get(key)) for key in (*METRIC_KEYS, *known)}
        self._held_back += json.dumps(line, allow_nan=False).encode() + b"\n"
        self._try(self._write)

    def sync(self) -> None:
        """Wait until the logged steps are on the disk, as far as it has room."""
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
                _log.warning(f"{self._path}: {error.strerror}; metrics wait until {until}")
            self._waiting = True

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the lines held back and close the file."""
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
    """Return the logged steps of a `metrics.jsonl`, oldest first, without incomplete lines.

    Returns:
        One dictionary a step; none where there is no such file yet.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        return _records(read_bytes(path, most=_LARGEST))
    except (FileNotFoundError, DamagedError):
        return []


def _records(data: bytes) -> list[dict[str, Any]]:
    lines = data.splitlines(keepends=True)
    return [record for line in lines if (record := _record(line)) is not None]


def json_number(value: float | None) -> float | int | None:
    """Return a number for JSON: None if it is not finite, a Python float for any float type."""
    if value is None or isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the metrics in a line; None where it is incomplete or holds no step's metrics."""
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
