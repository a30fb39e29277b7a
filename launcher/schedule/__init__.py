"""Pipeline schedules, a class each, and their simulated timelines. Imports no JAX.

To add a schedule, write a class with its `order` (`GPipe` in `schedules.py` is the shortest) and
decorate it with `@register`, here or in a module of your own.
"""

from launcher.schedule.schedules import DEFAULT_SCHEDULE as DEFAULT_SCHEDULE
from launcher.schedule.schedules import FORWARD_SCHEDULE as FORWARD_SCHEDULE
from launcher.schedule.schedules import SCHEDULES as SCHEDULES
from launcher.schedule.schedules import Kind as Kind
from launcher.schedule.schedules import Schedule as Schedule
from launcher.schedule.schedules import ScheduleError as ScheduleError
from launcher.schedule.schedules import Task as Task
from launcher.schedule.schedules import Tasks as Tasks
from launcher.schedule.schedules import backward_follows as backward_follows
from launcher.schedule.schedules import dependencies as dependencies
from launcher.schedule.schedules import make_tasks as make_tasks
from launcher.schedule.schedules import max_in_flight as max_in_flight
from launcher.schedule.schedules import register as register
from launcher.schedule.schedules import training_schedules as training_schedules
from launcher.schedule.simulate import Route as Route
from launcher.schedule.simulate import Routes as Routes
from launcher.schedule.simulate import Shared as Shared
from launcher.schedule.simulate import TimedTask as TimedTask
from launcher.schedule.simulate import bubble_fraction as bubble_fraction
from launcher.schedule.simulate import simulate as simulate
from launcher.schedule.simulate import simulate_shared as simulate_shared
from launcher.schedule.simulate import step_seconds as step_seconds
