"""1F1B (PipeDream), and eager 1F1B.

1F1B: Narayanan et al. 2019, in the flushing form of Narayanan et al. 2021, arXiv 2104.04473. Eager
1F1B: Zhuang et al. 2023, arXiv 2211.05322, §4.
"""

from __future__ import annotations

from typing import ClassVar

from launcher.schedule.base import Schedule
from launcher.schedule.tasks import Kind, Task, Tasks, alternate


class OneFOneB(Schedule):
    """Stage s runs ahead by `num_meshes - s` microbatches at most, then alternates."""

    name = "1f1b"
    ahead: ClassVar[int] = 1  # microbatches that a stage runs ahead of each later one

    def tasks(self, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1) -> Tasks:
        """See `Schedule.tasks`."""

        def of_stage(s: int) -> tuple[Task, ...]:
            forwards = [Task(s, m, Kind.FORWARD) for m in range(num_micro_batches)]
            backwards = [Task(s, m, Kind.BACKWARD) for m in range(num_micro_batches)]
            return alternate(forwards, backwards, self.ahead * (num_meshes - s - 1))

        return tuple(of_stage(s) for s in range(num_meshes))

    def in_flight(
        self, mesh: int, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1
    ) -> int:
        """Return the microbatches of the warm-up and one more."""
        return self.ahead * (num_meshes - mesh - 1) + 1

    def hidden_forwards(self, behind: int, num_micro_batches: int) -> int:
        """Return the microbatches of the warm-up."""
        return min(self.ahead * behind, num_micro_batches - 1)

    def round_trips(self, behind: int, num_micro_batches: int) -> int:
        """Return how often as many as may be in flight follow one another."""
        return (num_micro_batches - 1) // (self.ahead * behind + 1)


class EagerOneFOneB(OneFOneB):
    """Run 1F1B twice as far ahead, by `2 (num_meshes - s) - 1` microbatches at most.

    While one microbatch is computed, the next one's activations are on their way.
    """

    name = "eager_1f1b"
    improves_1f1b = True
    ahead = 2
