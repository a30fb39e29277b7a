"""Zero bubble, ZB-H1: Qi et al. 2023, arXiv 2401.10241."""

from __future__ import annotations

from launcher.schedule.base import Schedule
from launcher.schedule.tasks import Kind, Task, Tasks, alternate


class ZeroBubble(Schedule):
    """1F1B that sends a microbatch's gradient back before it computes those of the weights.

    Stage s does the weights of microbatch m after the input part of m + s, where 1F1B would wait:
    no stage holds more than `num_meshes` microbatches, 1F1B's most.
    """

    name = "zero_bubble"
    splits_backward = True
    improves_1f1b = True

    def tasks(self, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1) -> Tasks:
        """See `Schedule.tasks`."""

        def of_stage(s: int) -> tuple[Task, ...]:
            forwards = [Task(s, m, Kind.FORWARD) for m in range(num_micro_batches)]
            inputs = [Task(s, m, Kind.BACKWARD_INPUT) for m in range(num_micro_batches)]
            order = []
            for task in alternate(forwards, inputs, num_meshes - s - 1):
                order.append(task)
                if task.kind is Kind.BACKWARD_INPUT and task.microbatch >= s:
                    order.append(Task(s, task.microbatch - s, Kind.BACKWARD_WEIGHT))
            rest = range(max(0, num_micro_batches - s), num_micro_batches)
            return (*order, *(Task(s, m, Kind.BACKWARD_WEIGHT) for m in rest))

        return tuple(of_stage(s) for s in range(num_meshes))

    def in_flight(
        self, mesh: int, num_meshes: int, num_micro_batches: int, stages_per_mesh: int = 1
    ) -> int:
        """Return one for each mesh, as the first of 1F1B has."""
        return num_meshes

    def hidden_forwards(self, behind: int, num_micro_batches: int) -> int:
        """Return the microbatches of the warm-up."""
        return min(behind, num_micro_batches - 1)
