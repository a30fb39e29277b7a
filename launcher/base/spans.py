"""Spans: what ran from when to when, recorded from any thread of a process. Pure.

Times are nanoseconds since the epoch by the clock of this host (`time.time_ns`), which is also that
of JAX's profiler. `report.pages.timeline` brings the hosts' clocks together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Span:
    """Something that ran.

    Attributes:
        lane: where it ran: spans of a lane are drawn in one row, such as "device 0" or "put".
        name: what ran.
        start: when it began, in nanoseconds since the epoch.
        end: when it had ended, not before `start`.
        kind: its kind, such as "forward", "gradient sum" or "transfer"; it gives the colour.
        about: further attributes, JSON-able.
    """

    lane: str
    name: str
    start: int
    end: int
    kind: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)


class SpanRecorder:
    """Collects the spans of a process while it records; at other times it keeps none.

    Any thread may call `add` and `span`: to change a list or a dict by one call needs no lock.
    """

    def __init__(self) -> None:
        self._spans: list[Span] | None = None
        self._open: dict[int, Span] = {}  # blocks that have not ended

    @property
    def is_on(self) -> bool:
        """Whether it records."""
        return self._spans is not None

    def start(self) -> None:
        """Begin to record; what was recorded before and not taken is dropped."""
        self._spans = []

    def take(self) -> list[Span]:
        """End recording and return the spans; a block that has not ended is cut off now."""
        spans, self._spans = self._spans or [], None
        now = time.time_ns()
        return spans + [_ended(block, now) for block in list(self._open.values())]

    def add(self, lane: str, name: str, start: int, end: int, kind: str = "", **about: Any) -> None:
        """Record something that ran from `start` to `end`, `time.time_ns()` of both."""
        if (spans := self._spans) is not None:
            spans.append(Span(lane, name, start, max(start, end), kind or lane, about))

    @contextmanager
    def span(self, lane: str, name: str, **about: Any) -> Iterator[None]:
        """Record the time that a block takes, also if it raises, or began before the recording."""
        began = time.time_ns()
        block = Span(lane, name, began, began, lane, about)
        self._open[id(block)] = block
        try:
            yield
        finally:
            del self._open[id(block)]
            self.add(lane, name, began, time.time_ns(), **about)


def _ended(block: Span, now: int) -> Span:
    about = {**block.about, "goes_on": True}
    return Span(block.lane, block.name, block.start, max(block.start, now), block.kind, about)


@dataclass(frozen=True)
class Clock:
    """The clock of a process against that of the driver.

    Attributes:
        offset: nanoseconds by which it is ahead.
        uncertainty: nanoseconds by which the offset may be wrong: half of a round trip.
    """

    offset: int = 0
    uncertainty: int = 0


def clock_of(rounds: Sequence[tuple[int, int, int]]) -> Clock:
    """Return a clock, read by round trips: the middle of the fastest one is when it was read.

    Args:
        rounds: of each, when the question was sent, what the clock said, and when the answer was
            there; at least one.
    """
    sent, there, received = min(rounds, key=lambda one: one[2] - one[0])
    return Clock(there - (sent + received) // 2, (received - sent + 1) // 2)
