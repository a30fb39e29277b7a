"""Simulated timelines of schedules, as the planner predicts them and plots show them. Pure.

A link between meshes carries one transfer at a time, first come, first served. Emulated devices
also share the cores of their machine (`simulate_shared`). The order of a timeline is also the one
global order in which a single driver issues the tasks.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from launcher.schedule.schedules import Kind, ScheduleError, Task, Tasks, dependencies

_DONE = 1e-9  # of a task: rounding leaves no more


@dataclass(frozen=True)
class Route:
    """How the arrays of a microbatch get from one stage to another.

    Attributes:
        links: the links that they occupy, all at once.
        seconds: how long they occupy them.
        latency: how much later they arrive, in seconds; the links are free by then.
    """

    links: tuple[str, ...]
    seconds: float
    latency: float = 0.0


Routes = Mapping[tuple[int, int], Route]  # by (source, destination) stage
NO_ROUTES: Routes = MappingProxyType({})


_Times = dict[int, float]  # by microbatch


@dataclass
class Traffic:
    """The transfers of a simulated schedule, in the order in which they are sent.

    Attributes:
        routes: how each pair of stages that exchange arrays does it.
        num_stages: number of stages.
    """

    routes: Routes
    num_stages: int
    _free: dict[str, float] = field(default_factory=dict)
    # by stage and kind of task: when its results are complete
    _made: defaultdict[tuple[int, Kind], _Times] = field(default_factory=lambda: defaultdict(dict))
    # by destination, source and kind of task: when the results arrive
    _come: defaultdict[tuple[int, int, Kind], _Times] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _readers: dict[tuple[int, bool], list[tuple[int, Route]]] = field(default_factory=dict)
    _sources: dict[tuple[int, bool], list[int]] = field(default_factory=dict)
    _needed: dict[tuple[int, Kind], list[tuple[int, Kind, _Times, _Times]]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        for src, dst in sorted(self.routes, key=lambda pair: (pair[0], abs(pair[1] - pair[0]))):
            self._readers.setdefault((src, src < dst), []).append((dst, self.routes[src, dst]))
            if abs(dst - src) > 1:
                self._sources.setdefault((dst, src < dst), []).append(src)

    def send(self, task: Task, now: float) -> None:
        """Send the results of a task; tasks are given in the order in which they end.

        The nearest stage is served first.
        """
        stage, microbatch, kind = task
        self._made[stage, kind][microbatch] = now
        if kind is Kind.BACKWARD_WEIGHT:
            return
        free = self._free
        for dst, route in self._readers.get((stage, kind is Kind.FORWARD), ()):
            start = now
            for link in route.links:
                busy = free.get(link, 0.0)
                if busy > start:
                    start = busy
            end = start + route.seconds
            for link in route.links:
                free[link] = end
            self._come[dst, stage, kind][microbatch] = end + route.latency

    def arrival(self, task: Task) -> float | Task:
        """Return when all inputs of a task have arrived, or a task that has to end first."""
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


class TimedTask(NamedTuple):
    """A task with its mesh and its start and end, in seconds from the step's beginning."""

    task: Task
    mesh: int
    start: float
    end: float


def simulate(
    schedule: Tasks, duration: Callable[[Task], float], routes: Routes = NO_ROUTES
) -> list[TimedTask]:
    """Simulate a schedule; return its tasks by start time (ties: the later mesh first).

    Args:
        schedule: the tasks of every mesh.
        duration: seconds of a task.
        routes: the routes between stages; between all others a transfer takes no time.

    Raises:
        ScheduleError: the order can never be followed.
    """
    traffic = Traffic(routes, num_stages=len({task.stage for tasks in schedule for task in tasks}))
    free = [0.0] * len(schedule)
    position = [0] * len(schedule)
    counts = [len(tasks) for tasks in schedule]
    waiting: dict[Task, list[int]] = {}  # meshes whose next task needs this one
    events: list[tuple[float, bool, int]] = []  # a heap: (when, whether a task starts, -mesh)
    timed: list[TimedTask] = []
    arrival, send, push, pop = traffic.arrival, traffic.send, heapq.heappush, heapq.heappop

    def look(mesh: int) -> None:
        """See whether the mesh's next task can be given a start."""
        at = position[mesh]
        if at == counts[mesh]:
            return
        ready = arrival(schedule[mesh][at])
        if isinstance(ready, Task):
            waiting.setdefault(ready, []).append(mesh)
        else:
            push(events, (max(ready, free[mesh]), True, -mesh))

    for mesh in range(len(schedule)):
        look(mesh)
    while events:
        now, starts, later = pop(events)
        mesh = -later
        task = schedule[mesh][position[mesh]]
        if starts:
            end = free[mesh] = now + duration(task)
            timed.append(TimedTask(task, mesh, now, end))
            push(events, (end, False, -mesh))
            continue
        position[mesh] += 1
        send(task, now)
        look(mesh)
        for other in waiting.pop(task, ()):
            look(other)
    if len(timed) < sum(map(len, schedule)):
        raise ScheduleError("the schedule cannot be followed: every mesh waits for another")
    return timed


def step_seconds(timeline: list[TimedTask]) -> float:
    """From the first start to the last end."""
    return max((t.end for t in timeline), default=0.0)


def bubble_fraction(timeline: list[TimedTask], num_meshes: int) -> float:
    """Return the share of the meshes' time in which they wait, 0 … 1."""
    total = step_seconds(timeline) * num_meshes
    busy = sum(t.end - t.start for t in timeline)
    return 1.0 - busy / total if total else 0.0


@dataclass(frozen=True)
class Shared:
    """A machine of two devices or more.

    Attributes:
        devices: the number of devices.
        effective_parallelism: how many devices' worth of compute the machine sustains while all run
            a stage's tasks, by stage: 1 if one device alone is as fast as all together, `devices`
            if none slows another. Over `devices`, it is the share of a task's time with all at work
            that the task takes alone.
    """

    devices: int
    effective_parallelism: Sequence[float]

    def speed(self, stage: int, busy: int) -> float:
        """Return how much faster a task is with this many devices at work than with every one."""
        alone = self.effective_parallelism[stage] / self.devices
        return 1.0 / (alone + (1.0 - alone) * (busy - 1) / (self.devices - 1))


def simulate_shared(
    schedule: Tasks,
    duration: Callable[[Task], float],
    routes: Routes,
    devices_of: Sequence[int],
    machine: Shared,
) -> list[TimedTask]:
    """Simulate a schedule like `simulate`, with the tasks of all meshes slowing one another.

    Args:
        schedule: the tasks of every mesh.
        duration: seconds of a task with every device at work.
        routes: how arrays get from stage to stage.
        devices_of: the number of devices of each mesh.
        machine: how much the devices slow one another.

    Raises:
        ScheduleError: the order can never be followed.
    """
    traffic = Traffic(routes, num_stages=len({task.stage for tasks in schedule for task in tasks}))
    position = [0] * len(schedule)
    # By mesh, for its next task: when its inputs arrive, or a task that has to end first.
    ready: list[float | Task | None] = [None] * len(schedule)
    ended: set[Task] = set()
    running: dict[int, tuple[Task, float, float]] = {}  # by mesh: task, start, rounding error
    left: dict[int, float] = {}
    timed: list[TimedTask] = []
    now, total = 0.0, sum(map(len, schedule))
    while len(timed) < total:
        waiting = []
        for mesh, tasks in enumerate(schedule):
            if mesh in running or position[mesh] == len(tasks):
                continue
            task, arrival = tasks[position[mesh]], ready[mesh]
            if arrival is None or arrival in ended:
                arrival = ready[mesh] = traffic.arrival(task)
            if isinstance(arrival, Task):
                continue
            if arrival <= now:
                left[mesh] = duration(task)
                running[mesh] = task, now, _DONE * max(left[mesh], 1e-12)
                position[mesh] += 1
                ready[mesh] = None
            else:
                waiting.append(arrival)
        if not running and not waiting:
            raise ScheduleError("the schedule cannot be followed: every mesh waits for another")
        busy = sum(devices_of[mesh] for mesh in running)
        speed = {mesh: machine.speed(task.stage, busy) for mesh, (task, *_) in running.items()}
        soonest = min((now + left[mesh] / speed[mesh] for mesh in running), default=float("inf"))
        until = min([soonest, *waiting])
        for mesh in list(running):
            over = now + left[mesh] / speed[mesh] <= until
            left[mesh] -= (until - now) * speed[mesh]
            task, start, least = running[mesh]
            if over or left[mesh] <= least:
                traffic.send(task, until)
                ended.add(task)
                timed.append(TimedTask(task, mesh, start, until))
                del running[mesh], left[mesh]
        now = until
    return sorted(timed, key=lambda t: (t.start, -t.mesh))
