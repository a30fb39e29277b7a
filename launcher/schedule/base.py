"""What a pipeline schedule is, and the registry of all of them.

A schedule is one class in one file: its tasks, its bound on activations in flight, what it may do,
and its paper. Settings, help, plans, the search and the property tests read the class; nothing
compares its name.
"""

from __future__ import annotations

import abc
import functools
from typing import ClassVar

from launcher.schedule.tasks import Kind, ScheduleError, Tasks, backward_follows


class Schedule(abc.ABC):
    """The order of every mesh's tasks.

    Attributes:
        name: what settings and plans call it.
        trains: whether it runs backward passes; False for evaluation.
        interleaves: whether a mesh may hold several stages.
        splits_backward: whether the backward pass is two tasks, the gradients that an earlier
            stage waits for and those of the weights.
        improves_1f1b: whether plans under it are searched for beside those under 1F1B; any that
            trains is tried on the best plan at last.
    """

    name: ClassVar[str]
    trains: ClassVar[bool] = True
    interleaves: ClassVar[bool] = False
    splits_backward: ClassVar[bool] = False
    improves_1f1b: ClassVar[bool] = False

    @abc.abstractmethod
    def tasks(self, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1) -> Tasks:
        """Return the tasks of every mesh in order; `stages_per_mesh` is 1 unless `interleaves`."""

    @abc.abstractmethod
    def in_flight(
        self, mesh: int, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1
    ) -> int:
        """Return the most microbatches whose activations a mesh holds at once.

        A microbatch counts once a stage; a number above all of them means all of them.
        """

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its tasks."""
        if not self.trains:
            return frozenset({Kind.FORWARD})
        if self.splits_backward:
            return frozenset({Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
        return frozenset({Kind.FORWARD, Kind.BACKWARD})

    def in_flight_bound(
        self, mesh: int, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1
    ) -> int:
        """Return an upper bound on `max_in_flight` of a mesh's tasks."""
        most = self.in_flight(mesh, num_meshes, num_micro_batches, stages_per_mesh)
        return min(most, num_micro_batches * stages_per_mesh)

    def hidden_forwards(self, behind: int, num_micro_batches: int) -> int:
        """Return the forward passes that a mesh does while it waits for the first gradient.

        They are those between the forward pass of the microbatch whose backward pass is its first,
        and that backward pass: what the pipeline's first round trip hides.

        Args:
            behind: number of meshes after it.
            num_micro_batches: number of microbatches.
        """
        tasks = self.tasks(behind + 1, num_micro_batches)[0]
        back = next(i for i, task in enumerate(tasks) if task.kind is not Kind.FORWARD)
        there = [t.microbatch for t in tasks[:back]].index(tasks[back].microbatch)
        return back - there - 1

    def round_trips(self, behind: int, num_micro_batches: int) -> int:
        """Return how many round trips a mesh waits for one after another, beside the first.

        Each is of one microbatch, from its forward pass through all meshes behind to the end of its
        backward pass. Where not all are in flight at once, some can only follow others; 0 is always
        true.

        Args:
            behind: number of meshes after it.
            num_micro_batches: number of microbatches.
        """
        return 0

    def last_stage_alternates(self, num_micro_batches: int) -> bool:
        """Return whether each backward pass of the last stage directly follows its forward pass.

        Both are one program then.
        """
        return _alternates(self, num_micro_batches)


SCHEDULES: dict[str, Schedule] = {}


def register(schedule: type[Schedule]) -> type[Schedule]:
    """Make a schedule known by its name, as a class decorator."""
    SCHEDULES[schedule.name] = schedule()
    return schedule


def training_schedules(interleaves: bool | None = None) -> tuple[str, ...]:
    """Return the names that a user may ask for; with `interleaves`, those that do or do not."""
    return tuple(
        name
        for name, schedule in SCHEDULES.items()
        if schedule.trains and interleaves in (None, schedule.interleaves)
    )


def make_tasks(name: str, num_stages: int, num_meshes: int, num_micro_batches: int) -> Tasks:
    """Return the tasks of every mesh under the schedule of that name.

    Raises:
        ScheduleError: it cannot put so many stages on so many meshes.
    """
    schedule = SCHEDULES[name]
    stages_per_mesh, rest = divmod(num_stages, num_meshes)
    if rest or (stages_per_mesh > 1 and not schedule.interleaves):
        raise ScheduleError(f"{name} cannot run {num_stages} stages on {num_meshes} meshes")
    return _tasks(schedule, num_meshes, num_micro_batches, stages_per_mesh)


@functools.lru_cache(maxsize=8)
def _tasks(schedule: Schedule, num_meshes: int, num_micro_batches: int, per_mesh: int) -> Tasks:
    return schedule.tasks(num_meshes, num_micro_batches, per_mesh)


@functools.lru_cache(maxsize=1024)
def _alternates(schedule: Schedule, num_micro_batches: int) -> bool:
    return backward_follows(schedule.tasks(1, num_micro_batches)[0], 0)
