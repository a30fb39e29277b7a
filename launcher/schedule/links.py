"""Links between meshes, which one transfer at a time occupies: first come, first served. Pure."""

from __future__ import annotations

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
    _there: dict[tuple[Task, int], float] = field(default_factory=dict)
    _readers: dict[tuple[int, bool], list[int]] = field(default_factory=dict)
    _sources: dict[tuple[int, bool], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for src, dst in sorted(self.ways, key=lambda way: (way[0], abs(way[1] - way[0]))):
            self._readers.setdefault((src, src < dst), []).append(dst)
            if abs(dst - src) > 1:
                self._sources.setdefault((dst, src < dst), []).append(src)

    def send(self, task: Task, now: float) -> None:
        """Send what a task has made, which ends no earlier than any that was given before.

        It goes to the nearest stage first.
        """
        self._there[task, task.stage] = now
        if task.kind is Kind.BACKWARD_WEIGHT:
            return
        for dst in self._readers.get((task.stage, task.kind is Kind.FORWARD), ()):
            way = self.ways[task.stage, dst]
            start = max((now, *(self._free.get(link, 0.0) for link in way.links)))
            self._free.update(dict.fromkeys(way.links, start + way.seconds))
            self._there[task, dst] = start + way.seconds + way.latency

    def arrival(self, task: Task) -> float | Task:
        """Return when all that a task needs is there, or a task that has to end before."""
        latest = 0.0
        for need in self._needs(task):
            there = self._there.get((need, task.stage))
            if there is None:
                there = self._there.get((need, need.stage))
            if there is None:
                return need
            latest = max(latest, there)
        return latest

    def _needs(self, task: Task) -> tuple[Task, ...]:
        """Return the tasks whose results a task may need, those of stages further away included."""
        near = dependencies(task, self.num_stages)
        far = self._sources.get((task.stage, task.kind is Kind.FORWARD), ())
        if not far or task.kind is Kind.BACKWARD_WEIGHT:
            return near
        return (*near, *(Task(src, task.microbatch, task.kind) for src in far))
