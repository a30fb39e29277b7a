"""Pipeline schedules: tasks and their dependencies, and a class for each schedule, registered.

Stage s lives on mesh `s % num_meshes`. A schedule only orders the tasks of each mesh; when they run
follows from their dependencies (`simulate`). Settings, help, plans, the search and the property
tests read the class of a schedule; nothing compares its name. Imports no JAX.
"""

from __future__ import annotations

import abc
import enum
import functools
import itertools
from collections.abc import Sequence
from typing import ClassVar, NamedTuple


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

    def on_stage(self, stage: int) -> Task:
        """Return the same task of another stage."""
        return self._replace(stage=stage)


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


class Schedule(abc.ABC):
    """The order of each mesh's tasks.

    Attributes:
        name: the name in settings and plans.
        trains: whether it runs backward passes; False for evaluation.
        interleaves: whether a mesh may hold several stages.
        splits_backward: whether the backward pass is two tasks, the gradients that an earlier
            stage waits for and those of the weights.
        improves_1f1b: whether the search plans under it beside 1F1B; every schedule that trains is
            tried on the best plan at the end.
    """

    name: ClassVar[str]
    trains: ClassVar[bool] = True
    interleaves: ClassVar[bool] = False
    splits_backward: ClassVar[bool] = False
    improves_1f1b: ClassVar[bool] = False

    @abc.abstractmethod
    def order(
        self, mesh: int, num_meshes: int, num_micro_batches: int, stages_per_mesh: int
    ) -> Sequence[Task]:
        """Return the tasks of one mesh in order; `stages_per_mesh` is 1 unless `interleaves`."""

    def tasks(self, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1) -> Tasks:
        """Return the tasks of every mesh in order."""
        return tuple(
            tuple(self.order(mesh, num_meshes, num_micro_batches, stages_per_mesh))
            for mesh in range(num_meshes)
        )

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
        """Return the most microbatches whose activations a mesh holds at once (`max_in_flight`)."""
        return _in_flight(self, mesh, num_meshes, num_micro_batches, stages_per_mesh)

    def hidden_forwards(self, behind: int, num_micro_batches: int) -> int:
        """Return the forward passes that a mesh runs while it waits for the first gradient.

        They lie between the forward pass of the microbatch whose backward pass comes first and that
        backward pass: the work that hides the pipeline's first round trip.

        Args:
            behind: number of meshes after it.
            num_micro_batches: number of microbatches.
        """
        return _hidden_forwards(self, behind, num_micro_batches)

    def round_trips(self, behind: int, num_micro_batches: int) -> int:
        """Return a lower bound on the sequential round trips of a mesh after the first one.

        A round trip takes one microbatch from its forward pass through all meshes behind to the end
        of its backward pass. Unless all are in flight at once, some can only follow others.

        Args:
            behind: number of meshes after it.
            num_micro_batches: number of microbatches.
        """
        return 0

    def last_stage_alternates(self, num_micro_batches: int) -> bool:
        """Return whether each backward pass of the last stage directly follows its forward pass.

        Both are then one program.
        """
        return _alternates(self, num_micro_batches)


SCHEDULES: dict[str, Schedule] = {}


def register(schedule: type[Schedule]) -> type[Schedule]:
    """Register a schedule under its name; a class decorator."""
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
        ScheduleError: the stages do not divide over the meshes as the schedule needs.
    """
    schedule = SCHEDULES[name]
    stages_per_mesh, rest = divmod(num_stages, num_meshes)
    if rest or (stages_per_mesh > 1 and not schedule.interleaves):
        raise ScheduleError(f"{name} cannot run {num_stages} stages on {num_meshes} meshes")
    return _tasks(schedule, num_meshes, num_micro_batches, stages_per_mesh)


@functools.lru_cache(maxsize=4096)  # a search asks for the same few again and again
def _in_flight(schedule: Schedule, mesh: int, num_meshes: int, count: int, each: int) -> int:
    return max_in_flight(schedule.order(mesh, num_meshes, count, each))


@functools.lru_cache(maxsize=4096)
def _hidden_forwards(schedule: Schedule, behind: int, count: int) -> int:
    tasks = schedule.order(0, behind + 1, count, 1)
    back = next(i for i, task in enumerate(tasks) if task.kind is not Kind.FORWARD)
    forward = [t.microbatch for t in tasks[:back]].index(tasks[back].microbatch)
    return back - forward - 1


@functools.lru_cache(maxsize=8)
def _tasks(schedule: Schedule, num_meshes: int, num_micro_batches: int, per_mesh: int) -> Tasks:
    return schedule.tasks(num_meshes, num_micro_batches, per_mesh)


@functools.lru_cache(maxsize=1024)
def _alternates(schedule: Schedule, num_micro_batches: int) -> bool:
    return backward_follows(schedule.tasks(1, num_micro_batches)[0], 0)


def alternate(forwards: Sequence[Task], backwards: Sequence[Task], warm_up: int) -> list[Task]:
    """Return `warm_up` forwards, then forward and backward by turns, then the other backwards."""
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    steady = [task for pair in pairs for task in pair]
    return [*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :]]


def rounds(num_meshes: int, num_micro_batches: int) -> list[range]:
    """Divide the microbatches into as many equal rounds as have at least one for every mesh.

    A shorter round would stall the pipeline. If they do not divide evenly, the first rounds take
    one more.
    """
    count = max(1, num_micro_batches // num_meshes)
    size, longer = divmod(num_micro_batches, count)
    ends = list(itertools.accumulate(size + (i < longer) for i in range(count)))
    return [range(a, b) for a, b in itertools.pairwise((0, *ends))]


@register
class GPipe(Schedule):
    """All forwards, then all backwards in reverse; every microbatch's activations are in flight.

    Huang et al. 2019, arXiv 1811.06965.
    """

    name = "gpipe"

    def order(
        self, mesh: int, num_meshes: int, num_micro_batches: int, stages_per_mesh: int
    ) -> list[Task]:
        """See `Schedule.order`."""
        batches = range(num_micro_batches)
        forwards = [Task(mesh, m, Kind.FORWARD) for m in batches]
        return forwards + [Task(mesh, m, Kind.BACKWARD) for m in reversed(batches)]


@register
class OneFOneB(Schedule):
    """Stage s runs ahead by `num_meshes - s` microbatches at most, then alternates.

    PipeDream, Narayanan et al. 2019, in the flushing form of Narayanan et al. 2021,
    arXiv 2104.04473.
    """

    name = "1f1b"
    ahead: ClassVar[int] = 1  # microbatches that a stage runs ahead of each later one

    def order(
        self, mesh: int, num_meshes: int, num_micro_batches: int, stages_per_mesh: int
    ) -> list[Task]:
        """See `Schedule.order`."""
        forwards = [Task(mesh, m, Kind.FORWARD) for m in range(num_micro_batches)]
        backwards = [Task(mesh, m, Kind.BACKWARD) for m in range(num_micro_batches)]
        return alternate(forwards, backwards, self.ahead * (num_meshes - mesh - 1))

    def in_flight_bound(
        self, mesh: int, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1
    ) -> int:
        """Return the microbatches of the warm-up and one more: the count, in closed form."""
        return min(self.ahead * (num_meshes - mesh - 1) + 1, num_micro_batches)

    def round_trips(self, behind: int, num_micro_batches: int) -> int:
        """Return how often a full set of microbatches in flight follows another one."""
        return (num_micro_batches - 1) // (self.ahead * behind + 1)


@register
class EagerOneFOneB(OneFOneB):
    """Run 1F1B twice as far ahead, by `2 (num_meshes - s) - 1` microbatches at most.

    While one microbatch is computed, the next one's activations are in transfer. Zhuang et al.
    2023, arXiv 2211.05322, §4.
    """

    name = "eager_1f1b"
    improves_1f1b = True
    ahead = 2


@register
class InterleavedOneFOneB(Schedule):
    """Run 1F1B over several short stages on each mesh.

    A mesh takes its microbatches in rounds, a round through each of its stages in turn, so that the
    pipeline fills and drains `stages_per_mesh` times faster. Narayanan et al. 2021,
    arXiv 2104.04473, §2.2.
    """

    name = "interleaved_1f1b"
    interleaves = True
    improves_1f1b = True

    def order(
        self, mesh: int, num_meshes: int, num_micro_batches: int, stages_per_mesh: int
    ) -> list[Task]:
        """See `Schedule.order`."""
        last = stages_per_mesh - 1
        batches = rounds(num_meshes, num_micro_batches)
        order = [(k, m) for turn in batches for k in range(stages_per_mesh) for m in turn]
        forwards = [Task(mesh + k * num_meshes, m, Kind.FORWARD) for k, m in order]
        backwards = [Task(mesh + (last - k) * num_meshes, m, Kind.BACKWARD) for k, m in order]
        warm_up = 2 * (num_meshes - mesh - 1) + last * len(batches[0])
        return alternate(forwards, backwards, warm_up)

    def in_flight_bound(
        self, mesh: int, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1
    ) -> int:
        """Return the microbatches of the warm-up and one more: the count, in closed form."""
        longest = len(rounds(num_meshes, num_micro_batches)[0])
        warm_up = 2 * (num_meshes - mesh - 1) + (stages_per_mesh - 1) * longest
        return min(warm_up + 1, num_micro_batches * stages_per_mesh)


@register
class ZeroBubble(Schedule):
    """1F1B that sends a microbatch's gradient back before it computes those of the weights.

    Stage s computes the weight gradients of microbatch m after the input part of m + s, where 1F1B
    would idle: no stage holds more than `num_meshes` microbatches, 1F1B's most. ZB-H1 of Qi et al.
    2023, arXiv 2401.10241.
    """

    name = "zero_bubble"
    splits_backward = True
    improves_1f1b = True

    def order(
        self, mesh: int, num_meshes: int, num_micro_batches: int, stages_per_mesh: int
    ) -> list[Task]:
        """See `Schedule.order`."""
        batches = range(num_micro_batches)
        forwards = [Task(mesh, m, Kind.FORWARD) for m in batches]
        inputs = [Task(mesh, m, Kind.BACKWARD_INPUT) for m in batches]
        order = []
        for task in alternate(forwards, inputs, num_meshes - mesh - 1):
            order.append(task)
            if task.kind is Kind.BACKWARD_INPUT and task.microbatch >= mesh:
                order.append(Task(mesh, task.microbatch - mesh, Kind.BACKWARD_WEIGHT))
        rest = range(max(0, num_micro_batches - mesh), num_micro_batches)
        return order + [Task(mesh, m, Kind.BACKWARD_WEIGHT) for m in rest]


@register
class Forward(Schedule):
    """Evaluation: forward passes alone, in rounds where a mesh holds several stages."""

    name = "forward"
    trains = False
    interleaves = True

    def order(
        self, mesh: int, num_meshes: int, num_micro_batches: int, stages_per_mesh: int
    ) -> list[Task]:
        """See `Schedule.order`."""
        return [
            Task(mesh + k * num_meshes, m, Kind.FORWARD)
            for batches in rounds(num_meshes, num_micro_batches)
            for k in range(stages_per_mesh)
            for m in batches
        ]


DEFAULT_SCHEDULE = OneFOneB.name
FORWARD_SCHEDULE = Forward.name  # of evaluation
