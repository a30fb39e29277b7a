"""The timeline of a schedule on devices that share a machine: emulated ones. Pure.

The more devices are at work, the slower is each. A task's given seconds are those with every device
at work; how much of them it takes alone is known, and with some at work it is on the line between.
That is what was seen on few cores, where a device uses all of them in products and one of them in
what is done element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.schedule.links import Traffic, Ways
from launcher.schedule.simulate import TimedTask
from launcher.schedule.tasks import ScheduleError, Task, Tasks

_DONE = 1e-9  # of a task: what rounding leaves


@dataclass(frozen=True)
class Shared:
    """A machine of two devices or more.

    Attributes:
        devices: the number of devices.
        effective_parallelism: how many devices' worth of compute the machine sustains while all run
            a stage's tasks, by stage: 1 if one device alone is as fast as all together, `devices`
            if none slows another. Over `devices`, it is the share of a task's time with all at work
            that the task takes alone.
    """

    devices: int
    effective_parallelism: Sequence[float]

    def speed(self, stage: int, busy: int) -> float:
        """Return how much faster a task is with this many devices at work than with every one."""
        alone = self.effective_parallelism[stage] / self.devices
        return 1.0 / (alone + (1.0 - alone) * (busy - 1) / (self.devices - 1))


def simulate_shared(
    schedule: Tasks,
    duration: Callable[[Task], float],
    ways: Ways,
    devices_of: Sequence[int],
    machine: Shared,
) -> list[TimedTask]:
    """Run a schedule on paper like `simulate`, with the tasks of all meshes slowed by one another.

    Args:
        schedule: the tasks of every mesh.
        duration: seconds of a task with every device at work.
        ways: how arrays get from stage to stage.
        devices_of: the number of devices of each mesh.
        machine: how much the devices slow one another.

    Raises:
        ScheduleError: the order can never be followed.
    """
    traffic = Traffic(ways, num_stages=len({task.stage for tasks in schedule for task in tasks}))
    position = [0] * len(schedule)
    # Of each mesh's next task when its inputs are there, or a task that has to end before.
    ready: list[float | Task | None] = [None] * len(schedule)
    ended: set[Task] = set()
    running: dict[int, tuple[Task, float]] = {}  # by mesh, with when it started
    left: dict[int, float] = {}
    least: dict[int, float] = {}  # what rounding leaves of it
    timed: list[TimedTask] = []
    now, total = 0.0, sum(map(len, schedule))
    while len(timed) < total:
        waiting = []
        for mesh, tasks in enumerate(schedule):
            if mesh in running or position[mesh] == len(tasks):
                continue
            task, arrival = tasks[position[mesh]], ready[mesh]
            if arrival is None or arrival in ended:
                arrival = ready[mesh] = traffic.arrival(task)
            if isinstance(arrival, Task):
                continue
            if arrival <= now:
                running[mesh], left[mesh] = (task, now), duration(task)
                least[mesh] = _DONE * max(left[mesh], 1e-12)
                position[mesh] += 1
                ready[mesh] = None
            else:
                waiting.append(arrival)
        if not running and not waiting:
            raise ScheduleError("the schedule cannot be followed: every mesh waits for another")
        busy = sum(devices_of[mesh] for mesh in running)
        speed = {mesh: machine.speed(task.stage, busy) for mesh, (task, _) in running.items()}
        soonest = min((now + left[mesh] / speed[mesh] for mesh in running), default=float("inf"))
        until = min([soonest, *waiting])
        for mesh in list(running):
            over = now + left[mesh] / speed[mesh] <= until
            left[mesh] -= (until - now) * speed[mesh]
            task, start = running[mesh]
            if over or left[mesh] <= least[mesh]:
                traffic.send(task, until)
                ended.add(task)
                timed.append(TimedTask(task, mesh, start, until))
                del running[mesh], left[mesh]
        now = until
    return sorted(timed, key=lambda t: (t.start, -t.mesh))
