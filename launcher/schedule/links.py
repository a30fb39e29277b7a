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
    # of each stage: when it has the results of a task
    _there: defaultdict[int, dict[Task, float]] = field(default_factory=lambda: defaultdict(dict))
    _readers: dict[tuple[int, bool], list[tuple[int, Way]]] = field(default_factory=dict)
    _sources: dict[tuple[int, bool], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for src, dst in sorted(self.ways, key=lambda way: (way[0], abs(way[1] - way[0]))):
            self._readers.setdefault((src, src < dst), []).append((dst, self.ways[src, dst]))
            if abs(dst - src) > 1:
                self._sources.setdefault((dst, src < dst), []).append(src)

    def send(self, task: Task, now: float) -> None:
        """Send what a task has made, which ends no earlier than any that was given before.

        It goes to the nearest stage first.
        """
        stage, _, kind = task
        self._there[stage][task] = now
        if kind is Kind.BACKWARD_WEIGHT:
            return
        free = self._free
        for dst, way in self._readers.get((stage, kind is Kind.FORWARD), ()):
            start = now
            for link in way.links:
                start = max(start, free.get(link, 0.0))
            end = start + way.seconds
            for link in way.links:
                free[link] = end
            self._there[dst][task] = end + way.latency

    def arrival(self, task: Task) -> float | Task:
        """Return when all that a task needs is there, or a task that has to end before."""
        latest, own = 0.0, self._there[task.stage]
        for need in self._needs(task):
            there = own.get(need)
            if there is None:
                there = self._there[need.stage].get(need)
                if there is None:
                    return need
            if there > latest:
                latest = there
        return latest

    def _needs(self, task: Task) -> tuple[Task, ...]:
        """Return the tasks whose results a task may need, those of stages further away included."""
        near = dependencies(task, self.num_stages)
        if not self._sources:
            return near
        far = self._sources.get((task.stage, task.kind is Kind.FORWARD), ())
        if not far or task.kind is Kind.BACKWARD_WEIGHT:
            return near
        return (*near, *(Task(src, task.microbatch, task.kind) for src in far))
