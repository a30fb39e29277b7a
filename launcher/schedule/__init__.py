"""In which order: pipeline schedules, a class each, and their timelines. Imports no JAX.

To add a schedule, write one file with one class (`gpipe.py` is the shortest) and list it here;
one of your own is registered by `@register` in any module of yours.
"""

from launcher.schedule.base import SCHEDULES, Schedule, make_tasks, register, training_schedules
from launcher.schedule.forward import Forward
from launcher.schedule.gpipe import GPipe
from launcher.schedule.interleaved import InterleavedOneFOneB
from launcher.schedule.links import NO_WAYS, Way, Ways
from launcher.schedule.one_f_one_b import EagerOneFOneB, OneFOneB
from launcher.schedule.shared_machine import Shared, simulate_shared
from launcher.schedule.simulate import TimedTask, bubble_fraction, simulate, step_seconds
from launcher.schedule.tasks import (
    Kind,
    ScheduleError,
    Task,
    Tasks,
    backward_follows,
    clock_table,
    dependencies,
    max_in_flight,
)
from launcher.schedule.validate import validate_tasks
from launcher.schedule.zero_bubble import ZeroBubble

for _schedule in (GPipe, OneFOneB, EagerOneFOneB, InterleavedOneFOneB, ZeroBubble, Forward):
    register(_schedule)

DEFAULT_SCHEDULE = OneFOneB.name
FORWARD_SCHEDULE = Forward.name  # of evaluation

__all__ = [
    "DEFAULT_SCHEDULE",
    "FORWARD_SCHEDULE",
    "NO_WAYS",
    "SCHEDULES",
    "Kind",
    "Schedule",
    "ScheduleError",
    "Shared",
    "Task",
    "Tasks",
    "TimedTask",
    "Way",
    "Ways",
    "backward_follows",
    "bubble_fraction",
    "clock_table",
    "dependencies",
    "make_tasks",
    "max_in_flight",
    "register",
    "simulate",
    "simulate_shared",
    "step_seconds",
    "training_schedules",
    "validate_tasks",
]
