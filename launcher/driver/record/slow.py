"""The cause of a slowdown, from a few numbers of every few steps. Pure.

A *sample* has the seconds that each spot, such as a stage's programs or a link, took of a step.
The newest samples are compared with those before. What slows all stages at once, as another load
on the machine does, is no stage's own.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from launcher.plan.breakdown import StepSeconds
from launcher.report.text import percent_text, seconds_text

T = TypeVar("T")
STAGE, LINK, DISPATCH, DATA, GARBAGE = "stage", "link", "dispatch", "data", "garbage"
EVERY = 5  # steps from one sample to the next
_FEWEST, _MOST = 6, 40  # samples before the newest ones
_SPREAD = 0.005  # of the median: no spread is taken to be less
_NORMAL = 1.4826  # of a median absolute deviation, to a standard deviation
_SHARE = 0.02  # of the step, which a slowdown has to cost
_SEEN = 0.3  # of it that the step has to show
_EXPLAINS = 0.5  # of a slowdown, which its cause has to
_ALIKE = 0.5  # of the median: no sample that counts is below, and none above its inverse
_LOADED = 1.2  # times as long as all stages take at most, for one to be blamed
_STEADY = 0.2  # of the median: the spread of a wait that is the same at each step
_OF_DATA = 0.04  # of the step, for which devices wait for their batch


@dataclass(frozen=True)
class _Look:
    """How the newest samples are judged.

    Attributes:
        count: how many there are. A quarter of them at both ends does not count.
        sigmas: by how many standard deviations all others are to be slower.
        fewest: with how many samples before them they are compared at least.
    """

    count: int
    sigmas: float
    fewest: int


_LOOKS = _Look(3, 3.0, _FEWEST), _Look(9, 1.0, 2 * _FEWEST)  # much slower, or a little for longer


class Spot(NamedTuple):
    """A spot where the time of a step passes: its kind, such as `STAGE`, and its number or name."""

    kind: str
    name: str


@dataclass(frozen=True)
class StepSample:
    """A step's time, and the part of it at each spot that was measured, in seconds."""

    step: int
    step_seconds: float
    seconds: Mapping[Spot, float]


@dataclass(frozen=True)
class Slow:
    """A spot that slows the run.

    Attributes:
        cause: in a few words: "host 1 (stage 2)", "the data of worker 0".
        since: the first step that showed it.
        seconds: what it costs a step.
        step_seconds: the step.
    """

    cause: str
    since: int
    seconds: float
    step_seconds: float

    @property
    def gain(self) -> float:
        """The share by which the run would be faster without it."""
        return self.step_seconds / max(self.step_seconds - self.seconds, 1e-9) - 1

    def __str__(self) -> str:
        without = f"{percent_text(self.gain)} faster"
        return (
            f"{self.cause} has slowed the run since step {self.since} by "
            f"{seconds_text(self.seconds)} a step; without that: {without}"
        )


def spots_of(step: StepSeconds, stages_of: Mapping[int, Sequence[int]]) -> dict[Spot, float]:
    """Return the seconds of a recorded step by spots.

    Args:
        step: the step, divided.
        stages_of: the stages of each mesh.
    """
    found = {
        Spot(STAGE, str(stage)): row.forward_seconds + row.backward_seconds
        for stage, row in step.stages.items()
    }
    for meshes, seconds in step.waits.items():
        ends = ["+".join(map(str, stages_of.get(mesh, ()))) for mesh in meshes]
        found[Spot(LINK, " to ".join(ends))] = seconds
    return found | {Spot(DISPATCH, process): each for process, each in step.dispatch.items()}


class Monitor:
    """Samples of the same spots, and what slows the newest of them.

    Args:
        hosts: the hosts of each stage.

    Attributes:
        found: what slows the run; while there is something, no sample counts as normal.
    """

    def __init__(self, hosts: Sequence[Sequence[int]] = ()) -> None:
        self._hosts = [tuple(each) for each in hosts]
        self._before: deque[StepSample] = deque(maxlen=_MOST)
        self._newest: deque[StepSample] = deque()
        # Samples since something was slow, and how many end it: as many as named it first.
        self._calm, self._patience = 0, 0
        self.found: Slow | None = None

    def add(self, sample: StepSample) -> Slow | None:
        """Take the next sample; return what slows the run."""
        self._newest.append(sample)
        if len(self._newest) > _LOOKS[-1].count:
            earlier = self._newest.popleft()
            if self.found is None:
                self._before.append(earlier)
        for look in _LOOKS:
            newest = [*self._newest][-look.count :]
            if found := slowest(self._before, newest, look, self._hosts):
                self._name(found, look.count)
                return self.found
        self._calm += 1
        if self.found and self._calm >= self._patience:
            self.found = None
            self._newest = deque([*self._newest][-self._calm :])  # the others are not normal
        return self.found

    def _name(self, found: Slow, count: int) -> None:
        self._calm = 0
        if self.found and found.cause == self.found.cause:  # one that is hardly seen comes and goes
            found, count = replace(found, since=self.found.since), self._patience
        self.found, self._patience = found, count


def slowest(
    before: Sequence[StepSample],
    newest: Sequence[StepSample],
    look: _Look,
    hosts: Sequence[tuple[int, ...]] = (),
) -> Slow | None:
    """Return what slows the newest samples most, against those before; None if nothing does.

    Args:
        before: samples of the normal run.
        newest: the newest samples.
        look: how they are judged.
        hosts: the hosts of each stage.
    """
    if len(newest) < look.count or len(before) < look.fewest:
        return None
    step = statistics.median(sample.step_seconds for sample in newest)
    base, spread = _normal([sample.step_seconds for sample in before])
    rise, unsteady = step - base, look.sigmas * spread
    rises, sure = _rises(before, newest, look.sigmas)
    costs = {
        spot: min(rises[spot], rise)
        for spot in sure
        if rises[spot] >= _SHARE * step and rise >= max(unsteady, _SEEN * rises[spot])
    }
    for spot, seconds in _always_late(before, newest):
        if seconds >= max(unsteady, _OF_DATA * step):
            costs[spot] = rises[spot] = seconds
    # What explains little of a slowdown is not its cause, which may be a load on all machines.
    costs = {spot: cost for spot, cost in costs.items() if rises[spot] >= _EXPLAINS * rise}
    if not costs:
        return None
    worst = max(costs, key=lambda spot: costs[spot])
    alike = {spot for spot, seconds in rises.items() if seconds >= rises[worst] / 2}
    slow_stages = {spot for spot in alike if spot.kind == STAGE}
    if worst.kind == STAGE and not slow_stages <= _beside(worst, hosts):
        return None  # several hosts at once: a load that is uneven
    return Slow(_named(worst, alike, hosts), _counted(newest)[0].step, costs[worst], step)


def _always_late(
    before: Sequence[StepSample], newest: Sequence[StepSample]
) -> Iterator[tuple[Spot, float]]:
    """Yield the waits for data that have been as long from the start, and still are."""
    old, new = _columns(before), _columns(newest)
    for spot in new:
        if spot.kind == DATA and len(old[spot]) >= _FEWEST:
            middle, spread = _normal(old[spot])
            if spread <= _STEADY * middle and min(new[spot]) >= _ALIKE * middle:
                yield spot, middle


def _beside(spot: Spot, hosts: Sequence[tuple[int, ...]]) -> set[Spot]:
    """Return the stages on the hosts of a stage, itself included; itself alone on a single one."""
    if int(spot.name) >= len(hosts) or len({host for each in hosts for host in each}) == 1:
        return {spot}
    own = {*hosts[int(spot.name)]}
    return {Spot(STAGE, str(k)) for k, each in enumerate(hosts) if own & {*each}}


def _normal(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of values, and their standard deviation, robustly."""
    middle = statistics.median(values)
    off = statistics.median(abs(value - middle) for value in values)
    return middle, max(_NORMAL * off, _SPREAD * middle)


def _rises(
    before: Sequence[StepSample], newest: Sequence[StepSample], sigmas: float
) -> tuple[dict[Spot, float], set[Spot]]:
    """Return by how many seconds the spots take longer, and those that surely do.

    A load that slows all stages counts for none; under a heavy one nothing is sure.
    """
    old, new = _columns(before), _columns(newest)
    known = [spot for spot in new if len(new[spot]) == len(newest) and len(old[spot]) >= _FEWEST]
    base = {spot: _normal(old[spot]) for spot in known}
    stages = [spot for spot in known if spot.kind == STAGE and base[spot][0] > 0]
    # As the lower one of two: which of them is at fault is known by the other alone.
    loads = [
        max(1.0, statistics.median_low([new[spot][k] / base[spot][0] for spot in stages] or [1]))
        for k in range(len(newest))
    ]
    found, sure = {}, set()
    for spot in known:
        middle, spread = base[spot]
        more = [value - middle * load for value, load in zip(new[spot], loads, strict=True)]
        found[spot] = statistics.median(more)
        least = max(sigmas * spread, _ALIKE * found[spot])
        counted = _counted(sorted(more))
        steady = counted[0] > least and _ALIKE * counted[-1] < found[spot]
        if steady and _counted(sorted(loads))[-1] <= _LOADED:
            sure.add(spot)
    return found, sure


def _counted(values: Sequence[T]) -> Sequence[T]:
    """Return values without a quarter of them at both ends."""
    left_out = len(values) // 4
    return values[left_out : len(values) - left_out]


def _columns(samples: Sequence[StepSample]) -> dict[Spot, list[float]]:
    found: dict[Spot, list[float]] = defaultdict(list)
    for sample in samples:
        for spot, seconds in sample.seconds.items():
            found[spot].append(seconds)
    return found


def _named(spot: Spot, slow: set[Spot], hosts: Sequence[tuple[int, ...]]) -> str:
    """Return a spot in words; for a stage its host, if all stages there are slow."""
    kind, name = spot
    if kind != STAGE:
        return {
            LINK: f"the link of stage {name}",
            DISPATCH: f"the dispatch of programs in {name}",
            DATA: f"the data of {name}",
            GARBAGE: f"garbage collection in {name}",
        }[kind]
    there = _beside(spot, hosts)
    if not there <= slow or len({host for each in hosts for host in each}) < 2:
        return f"stage {name}"
    stages = ", ".join(sorted((stage.name for stage in there), key=int))
    own = hosts[int(name)]
    return (
        f"host{'s' if len(own) > 1 else ''} {', '.join(map(str, own))} "
        f"(stage{'s' if len(there) > 1 else ''} {stages})"
    )
