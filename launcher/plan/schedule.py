"""Pipeline schedules: for every mesh, its tasks in order. Pure functions of a few numbers.

Stage s lives on mesh `s % num_meshes`; only `interleaved_1f1b` (and evaluation) puts several stages
on a mesh. What runs when follows from the dependencies (`plan.simulate`); `check_schedule` proves
that a schedule can be followed and keeps within its bound. Imported by all of `plan` and `runtime`.

GPipe: Huang et al. 2019, arXiv 1811.06965. 1F1B: Narayanan et al. 2019 (PipeDream), in the flushing
form of Narayanan et al. 2021, arXiv 2104.04473, which also interleaves stages (§2.2). Eager 1F1B:
Zhuang et al. 2023, arXiv 2211.05322 (§4). Zero bubble: Qi et al. 2023, arXiv 2401.10241.
"""

from __future__ import annotations

import collections
import enum
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from launcher.plan.errors import ScheduleError


class Kind(enum.Enum):
    """What a task does to its microbatch.

    `BACKWARD` is the whole backward pass. `BACKWARD_INPUT` makes the gradients that an earlier
    stage waits for, `BACKWARD_WEIGHT` those of the stage's own weights, for which nobody waits.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"


class Task(NamedTuple):
    """One stage's work on one microbatch."""

    stage: int
    microbatch: int
    kind: Kind


Schedule = tuple[tuple[Task, ...], ...]

_LAST = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)  # the end of a microbatch on its stage
_PASSES = (
    {Kind.FORWARD},
    {Kind.FORWARD, Kind.BACKWARD},
    {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT},
)


def gpipe(num_meshes: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards in reverse; every microbatch's activations are in flight."""
    batches = range(num_micro_batches)
    return tuple(
        tuple(Task(s, m, Kind.FORWARD) for m in batches)
        + tuple(Task(s, m, Kind.BACKWARD) for m in reversed(batches))
        for s in range(num_meshes)
    )


def one_f_one_b(num_meshes: int, num_micro_batches: int) -> Schedule:
    """Stage s runs ahead by `num_meshes - s` microbatches at most, then alternates."""
    return _ahead(num_meshes, num_micro_batches, 1)


def eager_1f1b(num_meshes: int, num_micro_batches: int) -> Schedule:
    """1F1B that runs ahead twice as far, by `2 (num_meshes - s) - 1` microbatches at most: while
    one is computed, what another one waits for is on its way."""
    return _ahead(num_meshes, num_micro_batches, 2)


def _ahead(num_meshes: int, num_micro_batches: int, each: int) -> Schedule:
    """1F1B whose stages run ahead of every later one by `each` microbatches."""

    def tasks(s: int) -> tuple[Task, ...]:
        forwards = [Task(s, m, Kind.FORWARD) for m in range(num_micro_batches)]
        backwards = [Task(s, m, Kind.BACKWARD) for m in range(num_micro_batches)]
        return _alternate(forwards, backwards, each * (num_meshes - s - 1))

    return tuple(tasks(s) for s in range(num_meshes))


def interleaved_1f1b(num_meshes: int, num_micro_batches: int, stages_per_mesh: int) -> Schedule:
    """1F1B over short stages: a mesh takes its microbatches in rounds, a round through each of its
    stages in turn, so that the pipeline fills and drains `stages_per_mesh` times faster."""
    last = stages_per_mesh - 1
    rounds = _rounds(num_meshes, num_micro_batches)
    order = [(k, m) for batches in rounds for k in range(stages_per_mesh) for m in batches]

    def tasks(mesh: int) -> tuple[Task, ...]:
        forwards = [Task(mesh + k * num_meshes, m, Kind.FORWARD) for k, m in order]
        backwards = [Task(mesh + (last - k) * num_meshes, m, Kind.BACKWARD) for k, m in order]
        return _alternate(forwards, backwards, 2 * (num_meshes - mesh - 1) + last * len(rounds[0]))

    return tuple(tasks(mesh) for mesh in range(num_meshes))


def zero_bubble(num_meshes: int, num_micro_batches: int) -> Schedule:
    """1F1B that sends a microbatch's gradient back before it computes those of the weights (ZB-H1).

    Stage s does the weights of microbatch m after the input part of m + s, where 1F1B would wait:
    no stage holds more than `num_meshes` microbatches, 1F1B's most.
    """

    def tasks(s: int) -> tuple[Task, ...]:
        forwards = [Task(s, m, Kind.FORWARD) for m in range(num_micro_batches)]
        inputs = [Task(s, m, Kind.BACKWARD_INPUT) for m in range(num_micro_batches)]
        order = []
        for task in _alternate(forwards, inputs, num_meshes - s - 1):
            order.append(task)
            if task.kind is Kind.BACKWARD_INPUT and task.microbatch >= s:
                order.append(Task(s, task.microbatch - s, Kind.BACKWARD_WEIGHT))
        rest = range(max(0, num_micro_batches - s), num_micro_batches)
        return (*order, *(Task(s, m, Kind.BACKWARD_WEIGHT) for m in rest))

    return tuple(tasks(s) for s in range(num_meshes))


def forward_only(num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1) -> Schedule:
    """Evaluation: every microbatch passes once."""
    return tuple(
        tuple(
            Task(mesh + k * num_meshes, m, Kind.FORWARD)
            for batches in _rounds(num_meshes, num_micro_batches)
            for k in range(stages_per_mesh)
            for m in batches
        )
        for mesh in range(num_meshes)
    )


def _alternate(
    forwards: Sequence[Task], backwards: Sequence[Task], warm_up: int
) -> tuple[Task, ...]:
    """`warm_up` forwards, then one forward and one backward by turns, then the other backwards."""
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    steady = [task for pair in pairs for task in pair]
    return (*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :])


def _rounds(num_meshes: int, num_micro_batches: int) -> list[range]:
    """The microbatches in as many equal rounds as have at least one for every mesh (a shorter
    round would stall the pipeline); where they do not divide, the first ones take one more."""
    count = max(1, num_micro_batches // num_meshes)
    size, longer = divmod(num_micro_batches, count)
    ends = list(itertools.accumulate(size + (i < longer) for i in range(count)))
    return [range(a, b) for a, b in itertools.pairwise((0, *ends))]


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "interleaved_1f1b": interleaved_1f1b,
    "zero_bubble": zero_bubble,
    "forward": forward_only,
}
SEVERAL_STAGES_A_MESH = ("interleaved_1f1b", "forward")


def make_schedule(name: str, num_stages: int, num_meshes: int, num_micro_batches: int) -> Schedule:
    """The schedule of that name.

    Raises:
        ScheduleError: it cannot put so many stages on so many meshes.
    """
    stages_per_mesh, rest = divmod(num_stages, num_meshes)
    if rest or (stages_per_mesh > 1 and name not in SEVERAL_STAGES_A_MESH):
        raise ScheduleError(f"{name} cannot run {num_stages} stages on {num_meshes} meshes")
    if name in SEVERAL_STAGES_A_MESH:
        return SCHEDULES[name](num_meshes, num_micro_batches, stages_per_mesh)
    return SCHEDULES[name](num_meshes, num_micro_batches)


def dependencies(task: Task, num_stages: int) -> tuple[Task, ...]:
    """The tasks whose results a task may need: its neighbours' and its own earlier ones."""
    stage, microbatch, kind = task
    if kind is Kind.FORWARD:
        return (Task(stage - 1, microbatch, kind),) if stage else ()
    if kind is Kind.BACKWARD_WEIGHT:
        return (Task(stage, microbatch, Kind.BACKWARD_INPUT),)
    own = Task(stage, microbatch, Kind.FORWARD)
    return (own, Task(stage + 1, microbatch, kind)) if stage + 1 < num_stages else (own,)


def clock_table(schedule: Schedule) -> tuple[tuple[Task | None, ...], ...]:
    """The schedule as rows of one clock each, every task taking one clock; a column a mesh.

    Raises:
        ScheduleError: the order can never be followed.
    """
    num_stages = len({task.stage for tasks in schedule for task in tasks})
    done: set[Task] = set()
    left = [collections.deque(tasks) for tasks in schedule]
    rows = []
    while any(left):
        row = tuple(
            tasks[0] if tasks and done.issuperset(dependencies(tasks[0], num_stages)) else None
            for tasks in left
        )
        if not any(row):
            waiting = [tasks[0] for tasks in left if tasks]
            raise ScheduleError(f"no task can run next; waiting: {waiting}")
        done.update(task for task in row if task)
        for tasks, task in zip(left, row, strict=True):
            if task:
                tasks.popleft()
        rows.append(row)
    return tuple(rows)


def backward_follows(tasks: Sequence[Task], stage: int) -> bool:
    """Whether the backward pass of every microbatch starts right after its forward pass on a stage,
    so that both can be one program."""
    pairs = itertools.pairwise(tasks)
    forwards = sum(t.stage == stage and t.kind is Kind.FORWARD for t in tasks)
    return forwards == sum(
        a[:2] == b[:2] and a.stage == stage and a.kind is Kind.FORWARD for a, b in pairs
    )


def max_in_flight(tasks: Sequence[Task]) -> int:
    """The most microbatches whose activations are held at once between these tasks of a mesh: from
    a stage's forward to the last task of its backward. A microbatch counts once a stage."""
    ends = {task[:2] for task in tasks if task.kind in _LAST}
    level = peak = 0
    for task in tasks:
        if task.kind is Kind.FORWARD and task[:2] in ends:
            level += 1
            peak = max(peak, level)
        elif task.kind in _LAST:
            level -= 1
    return peak


def in_flight_bound(
    name: str, mesh: int, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1
) -> int:
    """What `max_in_flight` of a mesh's tasks never exceeds under a schedule.

    `gpipe` holds every microbatch. `1f1b` holds one for each mesh from here to the last,
    `eager_1f1b` another one for each mesh after this one.
    `interleaved_1f1b` holds its warm-up and one more: two for each mesh after this one and a round
    for each stage but one. `zero_bubble` holds one for each mesh, as the first of `1f1b` does.
    """
    after, total = num_meshes - mesh - 1, num_micro_batches * stages_per_mesh
    longest = len(_rounds(num_meshes, num_micro_batches)[0])
    bounds = {
        "gpipe": total,
        "1f1b": after + 1,
        "eager_1f1b": 2 * after + 1,
        "interleaved_1f1b": 2 * after + (stages_per_mesh - 1) * longest + 1,
        "zero_bubble": num_meshes,
        "forward": 0,
    }
    return min(bounds[name], total)


def check_schedule(name: str, schedule: Schedule, num_stages: int, num_micro_batches: int) -> None:
    """Prove that a schedule does its work: every task once and on its stage's mesh, one at a time,
    each after what it needs, and no more in flight than the bound of that name.

    Raises:
        ScheduleError: it does not; a defect of ours.
    """
    num_meshes = len(schedule)
    listed = [task for tasks in schedule for task in tasks]
    passes = {task.kind for task in listed}
    if passes not in _PASSES:
        raise ScheduleError(f"{name} is no whole step: it has only {passes}")
    pairs = itertools.product(range(num_stages), range(num_micro_batches), passes)
    if len(listed) != len(set(listed)) or set(listed) != {Task(*pair) for pair in pairs}:
        raise ScheduleError(f"{name} does not run every task exactly once")
    for mesh, tasks in enumerate(schedule):
        if any(task.stage % num_meshes != mesh for task in tasks):
            raise ScheduleError(f"{name} runs another mesh's stage on mesh {mesh}")
        bound = in_flight_bound(name, mesh, num_meshes, num_micro_batches, num_stages // num_meshes)
        if max_in_flight(tasks) > bound:
            raise ScheduleError(f"{name} holds more than {bound} microbatches on mesh {mesh}")
    clock_table(schedule)
