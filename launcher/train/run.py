"""A whole run in the driver, from checked settings to an exit code. `launcher.command` calls it.

The driver plans and directs; it computes nothing itself. Here stands what is done for which task,
and what is said, and with which exit code, where it cannot be done.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import jax

from launcher.cluster.errors import ClusterError, WorkerError
from launcher.cluster.slurm_meeting import Meeting, dismiss
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.output import complain
from launcher.plan import PlanError
from launcher.report.console import make_console
from launcher.runtime import why_not_kept
from launcher.stop import Stop
from launcher.trace import TraceError
from launcher.train import folder
from launcher.train.calibrate import calibrate
from launcher.train.check import os_error_text
from launcher.train.prepare import prepare
from launcher.train.record import DivergedError
from launcher.train.recording import write_planned
from launcher.train.recovery import FailedError
from launcher.train.training import train_in, write_plan
from recipes import InputError


def run(config: Config, stop: Stop, meeting: Meeting | None = None) -> int:
    """Do `config.task`, "train", "plan" or "calibrate", and return the exit code of the process.

    `meeting` is with the other tasks of the Slurm job that this process is a task of. What goes
    wrong is said on standard error. The main thread only, and once a process. Raises
    KeyboardInterrupt where a signal ends it, as `stop` knows.
    """

    def work() -> int:
        if config.task == "train":
            return _train(config, stop, meeting)
        with stop.interruptible():
            if config.task == "calibrate":
                return calibrate(config.cluster, make_console())
            return _plan(config)

    return guarded(work)


def guarded(work: Callable[[], int]) -> int:
    """The exit code of `work`, or of what goes wrong in it, which is said on standard error."""
    jax.config.update("jax_platforms", "cpu")  # the devices are for the workers
    try:
        return work()
    except (ConfigError, InputError, TraceError, PlanError) as error:
        message, code = str(error), 2
    except OSError as error:
        message, code = os_error_text(error), 1
    except (DivergedError, ClusterError, WorkerError, FailedError) as error:
        message, code = str(error), 1
    complain(message)
    return code


def _plan(config: Config) -> int:
    console = make_console()
    ready = prepare(config, console, plan_only=True, finished=folder.check(config))
    with folder.claim(config) as home:
        write_plan(home, config, ready.plan)
        write_planned(home, ready.plan, ready.plan_seconds)
        console.print(f"\nthe plan is in {home.path / 'plan.json'}", soft_wrap=True)
        picture = home.path / "plots" / "timeline.png"
        console.print(f"its timeline is in {picture}", soft_wrap=True)
    if ready.problem:
        complain(ready.problem)
    return int(bool(ready.problem))


def _train(config: Config, stop: Stop, meeting: Meeting | None) -> int:
    console = make_console()
    with stop.interruptible():
        finished, steps = folder.check(config), config.train.steps
        ready = prepare(config, console, finished=finished) if finished < steps else None
    if ready is None:
        console.print(
            f"run {config.run.id} is complete, {finished} of {steps} steps; to go on with it, "
            "raise train.steps",
            soft_wrap=True,
        )
        if meeting is not None:
            dismiss(meeting)
        return 0

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    if problem := why_not_kept():  # the workers' own words are in their logs
        say(problem)
    with ExitStack() as stack:
        with stop.heeded(say, until="now"):  # it reads checkpoints
            home = stack.enter_context(folder.claim(config))
        stack.enter_context(stop.heeded(say, "Ctrl-C once more leaves at once"))
        return train_in(home, config, ready, console, stop, meeting)
