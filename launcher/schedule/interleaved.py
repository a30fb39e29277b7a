"""Interleaved 1F1B: Narayanan et al. 2021, arXiv 2104.04473, §2.2."""

from __future__ import annotations

from launcher.schedule.base import Schedule
from launcher.schedule.tasks import Kind, Task, Tasks, alternate, rounds


class InterleavedOneFOneB(Schedule):
    """Run 1F1B over several short stages on each mesh.

    A mesh takes its microbatches in rounds, a round through each of its stages in turn, so that the
    pipeline fills and drains `stages_per_mesh` times faster.
    """

    name = "interleaved_1f1b"
    interleaves = True
    improves_1f1b = True

    def tasks(self, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1) -> Tasks:
        """See `Schedule.tasks`."""
        last = stages_per_mesh - 1
        batches = rounds(num_meshes, num_micro_batches)
        order = [(k, m) for turn in batches for k in range(stages_per_mesh) for m in turn]

        def of_mesh(mesh: int) -> tuple[Task, ...]:
            forwards = [Task(mesh + k * num_meshes, m, Kind.FORWARD) for k, m in order]
            backwards = [Task(mesh + (last - k) * num_meshes, m, Kind.BACKWARD) for k, m in order]
            warm_up = 2 * (num_meshes - mesh - 1) + last * len(batches[0])
            return alternate(forwards, backwards, warm_up)

        return tuple(of_mesh(mesh) for mesh in range(num_meshes))

    def in_flight(
        self, mesh: int, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1
    ) -> int:
        """Return the warm-up and one more.

        The warm-up is two microbatches for each mesh after this one, and a round for each of its
        stages but one.
        """
        longest = len(rounds(num_meshes, num_micro_batches)[0])
        return 2 * (num_meshes - mesh - 1) + (stages_per_mesh - 1) * longest + 1
