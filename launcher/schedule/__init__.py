"""Pipeline schedules, a class each, and their simulated timelines. Imports no JAX.

To add a schedule, write a class with its `order` (`GPipe` in `schedules.py` is the shortest) and
decorate it with `@register`, here or in a module of your own.
"""

from launcher.schedule.schedules import (
    SCHEDULES,
    Forward,
    Kind,
    OneFOneB,
    Schedule,
    ScheduleError,
    Task,
    Tasks,
    backward_follows,
    clock_table,
    dependencies,
    make_tasks,
    max_in_flight,
    register,
    training_schedules,
    validate_tasks,
)
from launcher.schedule.simulate import (
    Route,
    Routes,
    Shared,
    TimedTask,
    bubble_fraction,
    simulate,
    simulate_shared,
    step_seconds,
)

DEFAULT_SCHEDULE = OneFOneB.name
FORWARD_SCHEDULE = Forward.name  # of evaluation

__all__ = [
    "DEFAULT_SCHEDULE",
    "FORWARD_SCHEDULE",
    "SCHEDULES",
    "Kind",
    "Route",
    "Routes",
    "Schedule",
    "ScheduleError",
    "Shared",
    "Task",
    "Tasks",
    "TimedTask",
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
