"""Division of a recorded step's time, device by device. Pure.

A device computes, takes part in a collective, or is idle. An idle moment belongs to the first of
these that holds:

- data: the device's process waits for the batch, or any process does while no device runs;
- transfers: the last array to arrive before the device resumed was on its way;
- driver: what the device needs is there, and the program that comes next is not sent off yet;
- bubble: another device computes, or an array is on its way elsewhere;
- residue: none of it.

Time that only the start of the recording takes, with all devices idle, is no part of the step.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from launcher.base import Span
from launcher.plan.breakdown import PARTS, StageParts, StepSeconds
from launcher.report.pages.timeline import ProcessSpans

if TYPE_CHECKING:
    from launcher.plan import StagePlan

# Moments as disjoint intervals in ascending order, in nanoseconds.
Intervals: TypeAlias = list[tuple[float, float]]

_NS = 1e9
_SUM, _COLLECTIVE = "gradient sum", "collective"
_FORWARD = "forward"
_FUSED = "forward_backward"
_SLACK = 50_000  # ns by which a device may begin before the arrival of its input was seen


@dataclass(frozen=True)
class _Device:
    """What was recorded of a device: its programs, sums beside them, collectives inside them."""

    process: str
    mesh: int
    runs: Sequence[Span]
    sums: Sequence[Span]
    collectives: Sequence[Span]


@dataclass(frozen=True)
class _Step:
    """The moments of a step, in nanoseconds, over all devices and processes."""

    window: Intervals
    busy: Intervals
    data: Mapping[str, Intervals]
    dispatched: Mapping[tuple[str, str], int]  # by process and program: when it was sent off
    transfers: Sequence[Span]

    @property
    def moving(self) -> Intervals:
        return united(_times(self.transfers))


def measured_seconds(
    parts: Sequence[ProcessSpans], stages: Sequence[StagePlan] = ()
) -> StepSeconds | None:
    """Return the time of a recorded step, divided; None if no device's lane is in it.

    Args:
        parts: the spans that each process recorded, on one clock.
        stages: the plan's stages. Their predicted seconds divide a program of both passes into
            these, and an update between the stages on the same devices.
    """
    devices = [device for part in parts for device in _devices(part)]
    if not devices:
        return None
    step = _step(parts, devices)
    total = length(step.window)
    found = StepSeconds(total / _NS)
    rows: dict[int, list[StageParts]] = defaultdict(list)
    waits: dict[tuple[int, int], list[float]] = defaultdict(list)
    dispatch: dict[str, list[float]] = defaultdict(list)
    count = {mesh: sum(d.mesh == mesh for d in devices) for mesh in {d.mesh for d in devices}}
    for device in devices:
        split, waited = _split(device, step)
        for name, seconds in split.items():
            found.parts[name] += seconds / _NS / len(devices)
        for source, seconds in waited.items():
            waits[source, device.mesh].append(seconds / _NS)
        dispatch[device.process].append(split["driver"] / _NS)
        for row in _rows(device, step, stages):
            rows[row.stage].append(row)
    found.waits = {link: sum(each) / count[link[1]] for link, each in waits.items()}
    found.dispatch = {process: sum(each) / len(each) for process, each in dispatch.items()}
    found.stages = {stage: _mean(rows[stage]) for stage in sorted(rows)}
    return found


def _devices(part: ProcessSpans) -> list[_Device]:
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in part.spans:
        lanes[span.lane].append(span)
    found = []
    for lane, runs in lanes.items():
        if not (lane.startswith("device ") and lane.removeprefix("device ").isdigit()):
            continue
        beside = lanes.get(f"{lane} gradient sums", []), lanes.get(f"{lane} collectives", [])
        runs = sorted(runs, key=lambda span: span.start)
        found.append(_Device(part.process, int(runs[0].about["mesh"]), runs, *beside))
    return found


def _step(parts: Sequence[ProcessSpans], devices: Sequence[_Device]) -> _Step:
    spans = [(part.process, span) for part in parts for span in part.spans]
    ran = [span for device in devices for span in (*device.runs, *device.sums)]
    began = [s.start for _, s in spans if s.lane == "data"] or [
        s.start for _, s in spans if s.kind == "dispatch"
    ]
    start, end = min([*began, *(s.start for s in ran)]), max(span.end for span in ran)
    busy = united(_times(ran))
    transfers = [span for _, span in spans if span.kind == "transfer"]
    recording = united(_times(s for _, s in spans if s.kind == "recording"))
    recording = minus(minus(recording, busy), united(_times(transfers)))
    window = minus([(start, end)], recording)
    data: dict[str, Intervals] = {
        part.process: overlap(united(_times(s for s in part.spans if s.lane == "data")), window)
        for part in parts
    }
    dispatched = {(process, s.name): s.end for process, s in spans if s.kind == "dispatch"}
    return _Step(window, busy, data, dispatched, transfers)


def _times(spans: Iterable[Span]) -> Intervals:
    return [(span.start, span.end) for span in spans]


def _split(device: _Device, step: _Step) -> tuple[dict[str, float], dict[int, float]]:
    """Return a device's nanoseconds by part, and those it waited for arrays by the mesh."""
    runs = overlap(united(_times(device.runs)), step.window)
    sums = overlap(minus(united(_times(device.sums)), runs), step.window)
    inside = overlap(united(_times(device.collectives)), runs)
    left = minus(minus(step.window, runs), sums)
    found: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    found["compute"] = length(runs) - length(inside)
    found["collectives"] = length(sums) + length(inside)

    def take(part: str, moments: Intervals) -> float:
        nonlocal left
        taken = overlap(left, moments)
        left = minus(left, taken)
        found[part] += length(taken)
        return length(taken)

    everywhere = united(one for each in step.data.values() for one in each)
    take("data", united([*step.data[device.process], *minus(everywhere, step.busy)]))
    waited: dict[int, float] = defaultdict(float)
    begun, arrivals = 0.0, [s for s in step.transfers if s.about["dst_mesh"] == device.mesh]
    for run in device.runs:
        came = [s for s in arrivals if begun < s.end <= run.start + _SLACK]
        ready = begun
        if came:
            last = max(came, key=lambda span: span.end)
            ready = last.end
            waited[last.about["src_mesh"]] += take(
                "transfers", [(max(begun, last.start), max(begun, min(last.end, run.start)))]
            )
        sent = min(step.dispatched.get((device.process, run.name), 0), run.start)
        take("driver", united([(ready, sent)]))
        begun = max(begun, run.end)
    take("bubble", united([*step.busy, *step.moving]))
    found["residue"] = length(left)
    return found, waited


def _rows(device: _Device, step: _Step, plans: Sequence[StagePlan]) -> list[StageParts]:
    """Return the rows of the stages on a device, in seconds."""
    runs = united(_times(device.runs))
    sums = length(overlap(minus(united(_times(device.sums)), runs), step.window))
    forward: dict[int, float] = defaultdict(float)
    backward: dict[int, float] = defaultdict(float)
    update = sums
    for run in device.runs:
        seconds, stage = run.end - run.start, run.about.get("stage")
        if stage is None:
            update += seconds
            continue
        share = {_FORWARD: 1.0, _FUSED: _forward_share(plans, stage)}.get(run.kind, 0.0)
        forward[stage] += seconds * share
        backward[stage] += seconds * (1 - share)
    stages = sorted({*forward, *backward})
    shares = {s: plans[s].update_seconds if s < len(plans) else 0.0 for s in stages}
    whole = sum(shares.values())
    busy = length(overlap(runs, step.window)) + sums
    idle = length(step.window) - busy
    found = []
    for stage in stages:
        of_update = update * (shares[stage] / whole if whole else 1 / len(stages))
        own = forward[stage] + backward[stage] + of_update
        parts = forward[stage], backward[stage], of_update, idle, busy - own
        found.append(StageParts(stage, *(seconds / _NS for seconds in parts)))
    return found


def _forward_share(plans: Sequence[StagePlan], stage: int) -> float:
    if stage >= len(plans):  # recorded under another plan, by an earlier start
        return 0.5
    forward, backward = plans[stage].forward_seconds, plans[stage].backward_seconds
    return forward / max(forward + backward, 1e-12)


def _mean(rows: Sequence[StageParts]) -> StageParts:
    columns = zip(*(dataclasses.astuple(row) for row in rows), strict=True)
    stage, *seconds = (sum(column) / len(rows) for column in columns)
    return StageParts(int(stage), *seconds)


def united(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Return the moments that are in any of the intervals, which may overlap in any order."""
    found: Intervals = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def minus(these: Intervals, others: Intervals) -> Intervals:
    """Return the moments of `these` that are not in `others`."""
    found: Intervals = []
    k = 0
    for start, end in these:
        while k < len(others) and others[k][1] <= start:
            k += 1
        at = k
        while at < len(others) and others[at][0] < end:
            if others[at][0] > start:
                found.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < end:
            found.append((start, end))
    return found


def overlap(these: Intervals, others: Intervals) -> Intervals:
    """Return the moments that are in both."""
    return minus(these, minus(these, others))


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return how long disjoint intervals are together."""
    return sum(end - start for start, end in intervals)
