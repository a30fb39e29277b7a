"""`metrics.jsonl`: one JSON object a logged step, written and read here and nowhere else.

Every line holds every key of `METRIC_KEYS`, then the step's own extra ones. What is unknown and
what is not finite (NaN, infinity) is `null`: that is valid JSON, and every reader keeps the column
numeric.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from launcher.report.files import FULL, named
from launcher.report.tracker import METRIC_KEYS, Metrics


class JsonlTracker:
    """Appends to `path`, one flushed line a step, so that a crash costs no line but its own.

    Opening it for a run that goes on at `first_step` drops the lines of that step and later, and a
    last line that a crash tore: every step stands in the file once. `rewind` does the same later.

    While the disk is full, lines are held back and written when there is room; `warn` is told. The
    constructor, `log`, `sync` and, of a disk that is still full, `finish` raise OSError where the
    file cannot be written.
    """

    def __init__(
        self, path: Path, first_step: int = 1, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        self._path, self._warn = path, warn
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open for as long as the run
        self._held_back = b""
        self._full = False
        self.rewind(first_step)

    def rewind(self, first_step: int) -> None:
        """Drop the lines of `first_step` and later, written or held back."""
        with open(self._path, "rb") as file:
            end = _end_of_steps_before(first_step, file)
            file.seek(end)
            later = file.read() + self._held_back  # whose first may be a line begun in the file
        self._file.truncate(end)
        self._held_back = later[: _end_of_steps_before(first_step, later.splitlines(keepends=True))]

    def log(self, metrics: Metrics) -> None:
        line = {key: json_number(metrics.get(key)) for key in (*METRIC_KEYS, *metrics)}
        self._held_back += json.dumps(line, allow_nan=False).encode() + b"\n"
        self._try(self._write)

    def sync(self) -> None:
        """Wait until what is logged is on the disk, as far as that has room."""
        self._try(self._write)
        self._try(lambda: os.fsync(self._file.fileno()))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno not in FULL:
                raise
            if not self._full:
                self._warn(f"{self._path}: {error.strerror}; metrics wait until there is room")
            self._full = True

    def message(self, text: str) -> None:
        pass

    def finish(self, summary: Mapping[str, Any]) -> None:
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        try:
            while self._held_back:  # a disk that is nearly full takes a part
                self._held_back = self._held_back[self._file.write(self._held_back) :]
        except OSError as error:
            raise named(error, self._path) from None
        self._full = False


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The logged steps of a `metrics.jsonl`, oldest first; none where there is no file yet."""
    if not path.exists():
        return []
    lines = path.read_bytes()
    whole = lines[: _end_of_steps_before(None, lines.splitlines(keepends=True))]
    return [json.loads(line) for line in whole.splitlines()]


def json_number(value: float | None) -> float | int | None:
    """`value` as JSON can hold it: not-finite becomes None, and any float kind a Python float."""
    if value is None or isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


def _end_of_steps_before(first_step: int | None, lines: Iterable[bytes]) -> int:
    """How many bytes of `lines` are whole lines of steps before `first_step` (None: of any)."""
    end = 0
    for line in lines:
        if not line.endswith(b"\n"):
            break
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            break
        if first_step is not None and step >= first_step:
            break
        end += len(line)
    return end
