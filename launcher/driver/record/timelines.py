"""The timelines of a run: collected from its workers, and written to `timeline.json`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base import Clock, SpanRecorder
from launcher.driver.callback import Callback
from launcher.report.pages.timeline import FILE, ProcessSpans, read_timeline

if TYPE_CHECKING:
    from launcher.train.recordings import Recording

TRACES = "profile"

_log = logging.getLogger(__name__)


class Timelines(Callback):
    """Writes the timeline of a step once all workers have handed theirs in.

    Other steps in the file, perhaps of an earlier start of the run, stay.

    Args:
        folder: the run's folder.
        steps: the steps to record.
        traced: the steps of which JAX's profiler writes a trace.
        take: called with each complete step and the spans of each process, on one clock.

    Attributes:
        steps: the steps to record.
        traced: as given.
        traces: the folder of the profiler's traces.
        spans: takes what the driver does.
    """

    def __init__(
        self,
        folder: Path,
        steps: Iterable[int],
        traced: Iterable[int] = (),
        take: Callable[[int, Sequence[ProcessSpans]], None] = lambda step, parts: None,
    ) -> None:
        self.steps, self.traced = frozenset(steps), frozenset(traced)
        self.traces = folder / TRACES
        self._take = take
        self.spans = SpanRecorder()
        self._path = folder / FILE
        self._clocks: Sequence[Clock] = ()
        self._found: dict[int, dict[int, Recording]] = {}

    def begin(self, clocks: Sequence[Clock]) -> None:
        """Begin an attempt, whose workers have these clocks; forget what the one before left."""
        self._clocks, self._found = clocks, {}

    def add(self, recordings: Iterable[Recording]) -> None:
        """Take recordings of workers; a complete step is written."""
        for recording in recordings:
            parts = self._found.setdefault(recording.step, {})
            parts[recording.process] = recording
            if len(parts) >= len(self._clocks):
                self._write(recording.step, [parts[i] for i in sorted(parts)])

    def on_end(self, step: int, reason: str) -> None:
        """Warn of steps that are not in the file, as a worker did not send its part."""
        for recorded, parts in self._found.items():
            missing = [f"worker {i}" for i in range(len(self._clocks)) if i not in parts]
            if missing:
                whose = ", ".join(missing)
                _log.warning(f"no timeline of step {recorded}: what {whose} recorded has not come")

    def _write(self, step: int, recordings: Sequence[Recording]) -> None:
        parts = [
            ProcessSpans(f"worker {recording.process}", recording.spans, clock)
            for recording, clock in zip(recordings, self._clocks, strict=True)
        ]
        timeline = read_timeline(self._path).with_step(step, parts)
        own = self.spans.take()
        if not (ran := timeline.spans(step)):
            return
        first, last = ran[0].start, max(span.end for span in ran)
        during = [
            replace(span, start=max(span.start, first))
            for span in own
            if span.end > first and span.start < last
        ]
        timeline = timeline.with_step(step, [ProcessSpans("driver", during, Clock()), *parts])
        try:
            timeline.save(self._path)
        except OSError as error:
            _log.warning(f"the timeline of step {step} cannot be written: {error}")
        self._take(step, timeline.steps[step])
