"""Tasks and their dependencies: what every schedule puts in order. Pure functions, no JAX.

Stage s lives on mesh `s % num_meshes`. What runs when follows from the dependencies
(`schedule.simulate`).
"""

from __future__ import annotations

import collections
import enum
import itertools
from collections.abc import Sequence
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule cannot be followed: a defect of the schedule, not bad input."""


class Kind(enum.Enum):
    """What a task does to its microbatch.

    `BACKWARD` is the whole backward pass. `BACKWARD_INPUT` computes the gradients that an earlier
    stage waits for, `BACKWARD_WEIGHT` those of the stage's own weights, for which nobody waits.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"

    __hash__ = object.__hash__  # Enum's own is Python code, and tasks are looked up all the time


class Task(NamedTuple):
    """One stage's work on one microbatch."""

    stage: int
    microbatch: int
    kind: Kind


Tasks = tuple[tuple[Task, ...], ...]  # of every mesh, in order

_LAST = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)  # the end of a microbatch on its stage


def dependencies(task: Task, num_stages: int) -> tuple[Task, ...]:
    """Return the tasks whose results a task may need: its neighbours' and its own earlier ones."""
    stage, microbatch, kind = task
    if kind is Kind.FORWARD:
        return (Task(stage - 1, microbatch, kind),) if stage else ()
    if kind is Kind.BACKWARD_WEIGHT:
        return (Task(stage, microbatch, Kind.BACKWARD_INPUT),)
    own = Task(stage, microbatch, Kind.FORWARD)
    return (own, Task(stage + 1, microbatch, kind)) if stage + 1 < num_stages else (own,)


def clock_table(tasks: Tasks) -> tuple[tuple[Task | None, ...], ...]:
    """Return a row for each clock and a column for each mesh, every task taking one clock.

    Raises:
        ScheduleError: the order can never be followed.
    """
    num_stages = len({task.stage for column in tasks for task in column})
    done: set[Task] = set()
    left = [collections.deque(column) for column in tasks]
    rows = []
    while any(left):
        row = tuple(
            column[0] if column and done.issuperset(dependencies(column[0], num_stages)) else None
            for column in left
        )
        if not any(row):
            waiting = [column[0] for column in left if column]
            raise ScheduleError(f"no task can run next; waiting: {waiting}")
        done.update(task for task in row if task)
        for column, task in zip(left, row, strict=True):
            if task:
                column.popleft()
        rows.append(row)
    return tuple(rows)


def backward_follows(tasks: Sequence[Task], stage: int) -> bool:
    """Return whether every microbatch's backward pass directly follows its forward pass on a stage.

    Both can be one program then.
    """
    pairs = itertools.pairwise(tasks)
    forwards = sum(t.stage == stage and t.kind is Kind.FORWARD for t in tasks)
    return forwards == sum(
        a[:2] == b[:2] and a.stage == stage and a.kind is Kind.FORWARD for a, b in pairs
    )


def max_in_flight(tasks: Sequence[Task]) -> int:
    """Return the most microbatches whose activations a mesh holds at once during these tasks.

    They are held from a stage's forward to the last task of its backward. A microbatch counts once
    a stage.
    """
    ends = {task[:2] for task in tasks if task.kind in _LAST}
    level = peak = 0
    for task in tasks:
        if task.kind is Kind.FORWARD and task[:2] in ends:
            level += 1
            peak = max(peak, level)
        elif task.kind in _LAST:
            level -= 1
    return peak


def alternate(
    forwards: Sequence[Task], backwards: Sequence[Task], warm_up: int
) -> tuple[Task, ...]:
    """Return `warm_up` forwards, then forward and backward by turns, then the other backwards."""
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    steady = [task for pair in pairs for task in pair]
    return (*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :])


def rounds(num_meshes: int, num_micro_batches: int) -> list[range]:
    """Divide the microbatches into as many equal rounds as have at least one for every mesh.

    A shorter round would stall the pipeline; where they do not divide, the first rounds take one
    more.
    """
    count = max(1, num_micro_batches // num_meshes)
    size, longer = divmod(num_micro_batches, count)
    ends = list(itertools.accumulate(size + (i < longer) for i in range(count)))
    return [range(a, b) for a, b in itertools.pairwise((0, *ends))]
