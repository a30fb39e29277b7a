"""Evaluation: every microbatch passes through the stages once."""

from __future__ import annotations

from launcher.schedule.base import Schedule
from launcher.schedule.tasks import Kind, Task, Tasks, rounds


class Forward(Schedule):
    """Forward passes alone, in rounds where a mesh holds several stages; nothing is kept."""

    name = "forward"
    trains = False
    interleaves = True

    def tasks(self, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1) -> Tasks:
        """See `Schedule.tasks`."""
        return tuple(
            tuple(
                Task(mesh + k * num_meshes, m, Kind.FORWARD)
                for batches in rounds(num_meshes, num_micro_batches)
                for k in range(stages_per_mesh)
                for m in batches
            )
            for mesh in range(num_meshes)
        )

    def in_flight(
        self, mesh: int, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1
    ) -> int:
        """Return 0."""
        return 0
