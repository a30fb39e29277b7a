"""Pipeline schedules: for every stage, its tasks in order. Pure functions of two numbers.

A schedule is a tuple with one tuple of tasks a stage. What runs when follows from the
dependencies (`plan.simulate`), and `check_schedule` proves that the order can be followed.

GPipe: Huang et al. 2019, arXiv 1811.06965. 1F1B: Narayanan et al. 2019 (PipeDream), and 2021
(arXiv 2104.04473) for the flushing form used here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from launcher.plan.errors import ScheduleError


class Kind(enum.Enum):
    """What a task does to its microbatch."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Task(NamedTuple):
    """One stage's work on one microbatch."""

    stage: int
    microbatch: int
    kind: Kind


Schedule = tuple[tuple[Task, ...], ...]


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards in reverse; every microbatch's activations are in flight."""
    batches = range(num_micro_batches)
    return tuple(
        tuple(Task(s, m, Kind.FORWARD) for m in batches)
        + tuple(Task(s, m, Kind.BACKWARD) for m in reversed(batches))
        for s in range(num_stages)
    )


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Stage s runs ahead by `num_stages - s` microbatches at most, then alternates."""

    def tasks(stage: int) -> tuple[Task, ...]:
        warm_up = min(num_stages - stage - 1, num_micro_batches)
        order = [Task(stage, m, Kind.FORWARD) for m in range(warm_up)]
        for m in range(num_micro_batches - warm_up):
            order += [Task(stage, warm_up + m, Kind.FORWARD), Task(stage, m, Kind.BACKWARD)]
        last = range(num_micro_batches - warm_up, num_micro_batches)
        return tuple(order + [Task(stage, m, Kind.BACKWARD) for m in last])

    return tuple(tasks(s) for s in range(num_stages))


def forward_only(num_stages: int, num_micro_batches: int) -> Schedule:
    """Evaluation: every microbatch passes once."""
    return tuple(
        tuple(Task(s, m, Kind.FORWARD) for m in range(num_micro_batches)) for s in range(num_stages)
    )


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "forward": forward_only,
}


def dependencies(task: Task, num_stages: int) -> tuple[Task, ...]:
    """The tasks whose results a task may need: its neighbours', and its own forward."""
    stage, microbatch, kind = task
    if kind is Kind.FORWARD:
        return (Task(stage - 1, microbatch, kind),) if stage else ()
    own = Task(stage, microbatch, Kind.FORWARD)
    return (own, Task(stage + 1, microbatch, kind)) if stage + 1 < num_stages else (own,)


def clock_table(schedule: Schedule) -> tuple[tuple[Task | None, ...], ...]:
    """The schedule as rows of one clock each, every task taking one clock; a column a stage.

    Raises:
        ScheduleError: the order can never be followed.
    """
    num_stages = len(schedule)
    done: set[Task] = set()
    position = [0] * num_stages
    rows = []
    while any(position[s] < len(schedule[s]) for s in range(num_stages)):
        row: list[Task | None] = [None] * num_stages
        for s, tasks in enumerate(schedule):
            if position[s] < len(tasks):
                task = tasks[position[s]]
                if all(d in done for d in dependencies(task, num_stages)):
                    row[s] = task
        if not any(row):
            waiting = [
                tasks[p] for tasks, p in zip(schedule, position, strict=True) if p < len(tasks)
            ]
            raise ScheduleError(f"no task can run next; waiting: {waiting}")
        done.update(task for task in row if task)
        position = [p + bool(task) for p, task in zip(position, row, strict=True)]
        rows.append(tuple(row))
    return tuple(rows)


def max_in_flight(tasks: tuple[Task, ...]) -> int:
    """The most microbatches whose activations one stage holds at once."""
    level = peak = 0
    for task in tasks:
        level += 1 if task.kind is Kind.FORWARD else -1
        peak = max(peak, level)
    return peak
