"""The measured timeline of steps: all processes on one clock, as Chrome trace events. Pure.

`timeline.json` opens in Perfetto (https://ui.perfetto.dev) and in `chrome://tracing`: a process of
the trace is the driver or a worker, a thread of it is a lane. The format is that of the "Trace
Event Format"; every span is a complete event, and those of a thread are apart or nested.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.base import Clock, Span, write_whole

FILE = "timeline.json"


@dataclass(frozen=True)
class ProcessSpans:
    """What one process recorded of a step.

    Attributes:
        process: its name, such as "worker 0".
        spans: its spans, by its own clock.
        clock: its clock against the driver's.
    """

    process: str
    spans: Sequence[Span]
    clock: Clock


@dataclass(frozen=True)
class Timeline:
    """The recorded steps of a run.

    Attributes:
        steps: by the number of the step, what each process recorded, on the driver's clock; the
            clocks are those that were corrected for.
    """

    steps: Mapping[int, tuple[ProcessSpans, ...]] = field(default_factory=dict)

    def with_step(self, step: int, parts: Sequence[ProcessSpans]) -> Timeline:
        """Return the timeline with a step, by the processes' own clocks, in place of an older one.

        Each half of a transfer between processes is known to one of them: the span in the lane of
        the receiver begins when the sender sent it off.
        """
        return Timeline({**self.steps, step: _joined([_on_drivers_clock(p) for p in parts])})

    def spans(self, step: int | None = None) -> list[Span]:
        """Return the spans of all processes, those that begin first first.

        Args:
            step: the step; None: the last one.
        """
        step = max(self.steps) if step is None else step
        return sorted(
            (span for part in self.steps[step] for span in part.spans),
            key=lambda span: (span.start, -span.end),
        )

    def save(self, path: str | Path) -> None:
        """Write the Chrome trace."""
        write_whole(Path(path), json.dumps(chrome_trace(self)).encode())


def _on_drivers_clock(part: ProcessSpans) -> ProcessSpans:
    ahead = part.clock.offset
    spans = [replace(span, start=span.start - ahead, end=span.end - ahead) for span in part.spans]
    return replace(part, spans=tuple(spans))


def _joined(parts: Sequence[ProcessSpans]) -> tuple[ProcessSpans, ...]:
    def key(span: Span) -> tuple[Any, ...]:
        return tuple(span.about.get(name) for name in ("src_mesh", "dst_mesh", "number"))

    begun: dict[tuple[Any, ...], int] = {}
    for span in (span for part in parts for span in part.spans):
        if span.about.get("known") == "start":
            begun[key(span)] = max(begun.get(key(span), span.start), span.start)

    def whole(span: Span) -> Span:
        if span.about.get("known") != "end":
            return span
        start = min(max(span.start, begun.get(key(span), span.start)), span.end)
        return replace(span, start=start)

    def left(part: ProcessSpans) -> tuple[Span, ...]:
        return tuple(whole(s) for s in part.spans if s.about.get("known") != "start")

    return tuple(replace(part, spans=left(part)) for part in parts)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as a JSON object of trace events, in microseconds from its first span."""
    everything = [(step, part) for step, parts in timeline.steps.items() for part in parts]
    origin = min((s.start for _, part in everything for s in part.spans), default=0)
    processes = list(dict.fromkeys(part.process for _, part in everything))
    events: list[dict[str, Any]] = []
    for pid, process in enumerate(processes):
        events.append(_named("process_name", pid, 0, process))
        spans = [
            (step, span) for step, part in everything if part.process == process
            for span in part.spans
        ]  # fmt: skip
        lanes = sorted({span.lane for _, span in spans}, key=_in_order)
        tid = 0
        for lane in lanes:
            for row, found in enumerate(_rows([x for x in spans if x[1].lane == lane])):
                name = lane if row == 0 else f"{lane} ({row + 1})"
                events.append(_named("thread_name", pid, tid, name))
                events += [_event(step, span, pid, tid, origin) for step, span in found]
                tid += 1
    clocks = {
        str(step): {p.process: {"offset_ns": p.clock.offset, "uncertainty_ns": p.clock.uncertainty}
                    for p in parts}
        for step, parts in timeline.steps.items()
    }  # fmt: skip
    other = {"origin_unix_ns": origin, "steps": sorted(timeline.steps), "clocks": clocks}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _event(step: int, span: Span, pid: int, tid: int, origin: int) -> dict[str, Any]:
    return {
        "name": span.name,
        "cat": span.kind,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": (span.start - origin) / 1e3,
        "dur": (span.end - span.start) / 1e3,
        "args": {"step": step, **span.about},
    }


def _in_order(lane: str) -> tuple[Any, ...]:
    """Return a key that sorts devices by number, each before its sums, and then the other lanes."""
    words = lane.split(" ", 2)
    if words[0] == "device" and len(words) > 1 and words[1].isdigit():
        return 0, int(words[1]), words[2:]
    return 1, 0, [lane]


def _rows(spans: Iterable[tuple[int, Span]]) -> list[list[tuple[int, Span]]]:
    """Divide the spans of a lane into rows, in each of which they are apart or nested."""
    rows: list[list[tuple[int, Span]]] = []
    open_in: list[list[int]] = []  # of each row, the ends of the spans that are not over
    for step, span in sorted(spans, key=lambda one: (one[1].start, -one[1].end)):
        for ends in open_in:
            while ends and ends[-1] <= span.start:
                ends.pop()
        free = (n for n, ends in enumerate(open_in) if not ends or span.end <= ends[-1])
        at = next(free, len(rows))
        if at == len(rows):
            rows.append([])
            open_in.append([])
        rows[at].append((step, span))
        open_in[at].append(span.end)
    return rows


def read_timeline(path: Path) -> Timeline:
    """Read a file of `Timeline.save`; an empty timeline where there is none, or another."""
    try:
        return _from_trace(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Timeline()


def _from_trace(trace: Mapping[str, Any]) -> Timeline:
    other, names, lanes = trace["otherData"], {}, {}
    found: dict[int, dict[str, list[Span]]] = {}
    for event in trace["traceEvents"]:
        at = event["pid"], event["tid"]
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            lanes[at] = event["args"]["name"].partition(" (")[0]
        else:
            about = dict(event["args"])
            start = other["origin_unix_ns"] + round(event["ts"] * 1e3)
            end = start + round(event["dur"] * 1e3)
            span = Span(lanes[at], event["name"], start, end, event["cat"], about)
            step = found.setdefault(about.pop("step"), {})
            step.setdefault(names[event["pid"]], []).append(span)

    def part(step: int, process: str, spans: list[Span]) -> ProcessSpans:
        clock = other["clocks"][str(step)][process]
        return ProcessSpans(process, spans, Clock(clock["offset_ns"], clock["uncertainty_ns"]))

    return Timeline(
        {step: tuple(part(step, *one) for one in of.items()) for step, of in found.items()}
    )
