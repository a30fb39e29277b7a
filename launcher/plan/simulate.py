"""The timeline of a schedule under given durations: what the planner predicts and plots show.

Also the one global order in which a single driver issues the tasks. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.plan.errors import ScheduleError
from launcher.plan.schedule import Schedule, Task, dependencies


@dataclass(frozen=True)
class TimedTask:
    """A task with its start and end, in seconds from the step's beginning."""

    task: Task
    start: float
    end: float


def simulate(
    schedule: Schedule,
    duration: Callable[[Task], float],
    transfer: Callable[[int, int], float] = lambda src, dst: 0.0,
) -> list[TimedTask]:
    """Run the schedule on paper; tasks in order of their start (ties: the later stage first).

    Args:
        duration: seconds of a task. transfer: seconds from one stage to another.

    Raises:
        ScheduleError: the order can never be followed.
    """
    num_stages = len(schedule)
    end: dict[Task, float] = {}
    free = [0.0] * num_stages
    position = [0] * num_stages
    timed: list[TimedTask] = []
    total = sum(map(len, schedule))
    while len(timed) < total:
        ready = []
        for s, tasks in enumerate(schedule):
            if position[s] < len(tasks):
                needs = dependencies(tasks[position[s]], num_stages)
                if all(d in end for d in needs):
                    arrive = [
                        end[d] + (transfer(d.stage, s) if d.stage != s else 0.0) for d in needs
                    ]
                    ready.append((max([free[s], *arrive]), -s, tasks[position[s]]))
        if not ready:
            raise ScheduleError("the schedule cannot be followed: every stage waits for another")
        start, _, task = min(ready)
        finish = start + duration(task)
        end[task] = free[task.stage] = finish
        position[task.stage] += 1
        timed.append(TimedTask(task, start, finish))
    return timed


def step_seconds(timeline: list[TimedTask]) -> float:
    """From the first start to the last end."""
    return max((t.end for t in timeline), default=0.0)


def bubble_fraction(timeline: list[TimedTask], num_stages: int) -> float:
    """The share of the stages' time in which they wait, 0 … 1."""
    total = step_seconds(timeline) * num_stages
    busy = sum(t.end - t.start for t in timeline)
    return 1.0 - busy / total if total else 0.0
