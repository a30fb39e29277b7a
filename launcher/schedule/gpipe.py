"""GPipe: Huang et al. 2019, arXiv 1811.06965."""

from __future__ import annotations

from launcher.schedule.base import Schedule
from launcher.schedule.tasks import Kind, Task, Tasks


class GPipe(Schedule):
    """All forwards, then all backwards in reverse; every microbatch's activations are in flight."""

    name = "gpipe"

    def tasks(self, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1) -> Tasks:
        """See `Schedule.tasks`."""
        batches = range(num_micro_batches)
        return tuple(
            tuple(Task(s, m, Kind.FORWARD) for m in batches)
            + tuple(Task(s, m, Kind.BACKWARD) for m in reversed(batches))
            for s in range(num_meshes)
        )

    def in_flight(
        self, mesh: int, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1
    ) -> int:
        """Return every microbatch."""
        return num_micro_batches

    def hidden_forwards(self, behind: int, num_micro_batches: int) -> int:
        """Return 0: the last microbatch is the first to come back."""
        return 0
