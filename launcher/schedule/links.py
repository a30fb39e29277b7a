"""Links between meshes, which one transfer at a time occupies: first come, first served. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from launcher.schedule.tasks import Kind, Task, dependencies


@dataclass(frozen=True)
class Way:
    """How the arrays of a microbatch get from one stage to another.

    Attributes:
        links: the links that they occupy, all at once.
        seconds: how long they occupy them.
        latency: how much later they arrive, in seconds; the links are free by then.
    """

    links: tuple[str, ...]
    seconds: float
    latency: float = 0.0


Ways = Mapping[tuple[int, int], Way]  # by (source, destination) stage
NO_WAYS: Ways = MappingProxyType({})


_Times = dict[int, float]  # by microbatch


@dataclass
class Traffic:
    """The transfers of a schedule that is run on paper, in the order in which they are sent.

    Attributes:
        ways: how each pair of stages that exchange arrays does it.
        num_stages: number of stages.
    """

    ways: Ways
    num_stages: int
    _free: dict[str, float] = field(default_factory=dict)
    # of a stage and a kind of task: when it has made its results
    _made: defaultdict[tuple[int, Kind], _Times] = field(default_factory=lambda: defaultdict(dict))
    # of a stage, another one and a kind of task: when the results of the latter are at the former
    _come: defaultdict[tuple[int, int, Kind], _Times] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _readers: dict[tuple[int, bool], list[tuple[int, Way]]] = field(default_factory=dict)
    _sources: dict[tuple[int, bool], list[int]] = field(default_factory=dict)
    _needed: dict[tuple[int, Kind], list[tuple[int, Kind, _Times, _Times]]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        for src, dst in sorted(self.ways, key=lambda way: (way[0], abs(way[1] - way[0]))):
            self._readers.setdefault((src, src < dst), []).append((dst, self.ways[src, dst]))
            if abs(dst - src) > 1:
                self._sources.setdefault((dst, src < dst), []).append(src)

    def send(self, task: Task, now: float) -> None:
        """Send what a task has made, which ends no earlier than any that was given before.

        It goes to the nearest stage first.
        """
        stage, microbatch, kind = task
        self._made[stage, kind][microbatch] = now
        if kind is Kind.BACKWARD_WEIGHT:
            return
        free = self._free
        for dst, way in self._readers.get((stage, kind is Kind.FORWARD), ()):
            start = now
            for link in way.links:
                busy = free.get(link, 0.0)
                if busy > start:
                    start = busy
            end = start + way.seconds
            for link in way.links:
                free[link] = end
            self._come[dst, stage, kind][microbatch] = end + way.latency

    def arrival(self, task: Task) -> float | Task:
        """Return when all that a task needs is there, or a task that has to end before."""
        stage, microbatch, kind = task
        needed = self._needed.get((stage, kind))
        if needed is None:
            needed = self._needed[stage, kind] = self._needs(stage, kind)
        latest = 0.0
        for src, of, come, made in needed:
            there = come.get(microbatch)
            if there is None:
                there = made.get(microbatch)
                if there is None:
                    return Task(src, microbatch, of)
            if there > latest:
                latest = there
        return latest

    def _needs(self, stage: int, kind: Kind) -> list[tuple[int, Kind, _Times, _Times]]:
        """Return the tasks whose results a task may need, those of stages further away included.

        They are the stage and kind of each, when its results are here, and when they are made.
        """
        needs = [(src, of) for src, _, of in dependencies(Task(stage, 0, kind), self.num_stages)]
        if kind is not Kind.BACKWARD_WEIGHT:
            far = self._sources.get((stage, kind is Kind.FORWARD), ())
            needs += [(src, kind) for src in far]
        return [(src, of, self._come[stage, src, of], self._made[src, of]) for src, of in needs]
