"""The timeline of a schedule under given durations: what the planner predicts and plots show.

Also the one global order in which a single driver issues the tasks. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from launcher.schedule.links import NO_WAYS, Traffic, Ways
from launcher.schedule.tasks import ScheduleError, Task, Tasks


class TimedTask(NamedTuple):
    """A task with its mesh and its start and end, in seconds from the step's beginning."""

    task: Task
    mesh: int
    start: float
    end: float


def simulate(
    schedule: Tasks, duration: Callable[[Task], float], ways: Ways = NO_WAYS
) -> list[TimedTask]:
    """Run a schedule on paper; tasks in order of their start (ties: the later mesh first).

    Args:
        schedule: the tasks of every mesh.
        duration: seconds of a task.
        ways: how arrays get from stage to stage; between others they are there at once.

    Raises:
        ScheduleError: the order can never be followed.
    """
    traffic = Traffic(ways, num_stages=len({task.stage for tasks in schedule for task in tasks}))
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
