"""The proof that a schedule does its work."""

from __future__ import annotations

import itertools

from launcher.schedule.base import SCHEDULES
from launcher.schedule.tasks import ScheduleError, Task, Tasks, clock_table, max_in_flight


def validate_tasks(name: str, tasks: Tasks, num_stages: int, num_micro_batches: int) -> None:
    """Prove that tasks are a valid schedule.

    Every task runs once and on its stage's mesh, one at a time, each after what it needs, with no
    more microbatches in flight than the bound of the schedule of that name.

    Raises:
        ScheduleError: one of these does not hold.
    """
    schedule, num_meshes = SCHEDULES[name], len(tasks)
    listed = [task for column in tasks for task in column]
    kinds = {task.kind for task in listed}
    if kinds != schedule.kinds:
        raise ScheduleError(f"{name} is not a whole step: it has only {kinds}")
    triples = itertools.product(range(num_stages), range(num_micro_batches), kinds)
    if len(listed) != len(set(listed)) or set(listed) != {Task(*triple) for triple in triples}:
        raise ScheduleError(f"{name} does not run every task exactly once")
    for mesh, column in enumerate(tasks):
        if any(task.stage % num_meshes != mesh for task in column):
            raise ScheduleError(f"{name} runs another mesh's stage on mesh {mesh}")
        each = num_stages // num_meshes
        bound = schedule.in_flight_bound(mesh, num_meshes, num_micro_batches, each)
        if max_in_flight(column) > bound:
            raise ScheduleError(f"{name} holds more than {bound} microbatches on mesh {mesh}")
    clock_table(tasks)
