"""The pipeline schedules: one class each, with the paper that describes it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

from launcher.schedule.base import Kind, Schedule, Task, register


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
