"""A whole run in the driver, from checked settings to an exit code.

The driver plans and directs, and computes nothing itself. This module runs the settings' task, and
turns errors into messages and exit codes. JAX takes a second to import, so it is imported only
where it is needed, while Ray starts.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from launcher.base import complain, lines_to
from launcher.cluster.errors import ClusterError, WorkerError
from launcher.cluster.kinds import kind_of, pool_shape
from launcher.cluster.ray.session import RaySession, StartLimit
from launcher.cluster.slurm.rendezvous import Rendezvous, release_nodes
from launcher.config.cluster import machines_of
from launcher.config.compose import to_dict
from launcher.config.errors import ConfigError
from launcher.config.parallel import Planned
from launcher.config.schema import Config
from launcher.driver.callback import HookError, find_hook
from launcher.driver.folder import folder
from launcher.driver.folder.folder import RunFolder
from launcher.driver.folder.mirrored import bring_back, mirroring, own
from launcher.driver.folder.status import Status
from launcher.driver.planning.check import Inputs, is_kept, look, measures_first, os_error_text
from launcher.driver.planning.downloads import download
from launcher.driver.tasks.prepare_data import prepare_first
from launcher.driver.tasks.task import TaskKind, task_named
from launcher.recipes import InputError
from launcher.report.console import RunConsole, line_printer, make_console
from launcher.report.pages.plots import PlotProcess
from launcher.report.summary import REPORT, expected_text
from launcher.stop import Stop

if TYPE_CHECKING:
    from launcher.driver.planning.prepare import Prepared

_LEAVES = "Ctrl-C once more leaves at once"

_log = logging.getLogger(__name__)


def run(
    config: Config,
    stop: Stop,
    rendezvous: Rendezvous | None = None,
    compose: Callable[[Sequence[str]], Config] | None = None,
) -> int:
    """Do `config.task`, one that runs here.

    Call it in the main thread, once per process.

    Args:
        config: checked settings.
        stop: the signals received.
        rendezvous: with the other tasks of the Slurm job that this process belongs to.
        compose: see `TaskKind`.

    Returns:
        The exit code of the process.

    Raises:
        KeyboardInterrupt: a signal ended it; `stop` knows which.
        Exception: what `reported` knows, and faults.
    """
    task = task_named(config.task)(stop, rendezvous, compose)
    console = make_console(sys.stderr if task.answers else None)

    with (
        lines_to(line_printer(console)),
        stop.interruptible() if task.interruptible else nullcontext(),
    ):
        return task.run(config, console)


def guarded(work: Callable[[], int]) -> int:
    """Return the exit code of `work`, or that of its error, which is reported on standard error."""
    try:
        return work()
    except Exception as error:
        if (known := reported(error)) is None:
            raise
        complain(known[1])
        return known[2]


def reported(error: Exception) -> tuple[str, str, int] | None:
    """Return an error's kind, message and exit code; None for a fault of the launcher's."""
    text = str(error)
    if isinstance(error, ConfigError):
        return error.code, text, 2
    if isinstance(error, InputError):
        return "missing_package" if "pip install" in text else "input", text, 2
    if isinstance(error, ClusterError | WorkerError):
        return "cluster", text, 1
    if isinstance(error, OSError):
        return "system", os_error_text(error), 1
    from launcher.driver.failures import FailedError
    from launcher.driver.record.step_log import DivergedError
    from launcher.plan import PlanError, TooLargeError, UnfitError
    from launcher.runtime import ReplicaError
    from launcher.trace import TraceError

    match error:
        case UnfitError():
            return "memory", text, error.exit_code
        case PlanError():
            return "memory" if isinstance(error, TooLargeError) else "plan", text, 2
        case TraceError():
            return "program", text, 2
        case DivergedError() | FailedError() | ReplicaError() | HookError():
            return "failed", text, 1
    return None


class PlanOnly(TaskKind):
    """Plan a training, without starting it."""

    name = "plan"

    def run(self, config: Config, console: RunConsole) -> int:
        """Trace, plan and write the plan into the run's folder; return the exit code."""
        from launcher.driver.folder.folder import write_plan
        from launcher.driver.planning.advice import advised
        from launcher.driver.planning.compiled import verifies
        from launcher.driver.planning.prepare import plan, trace
        from launcher.driver.record.run_log import TIMELINE, write_planned
        from launcher.plan import UnfitError

        gc.freeze()  # what is imported stays: no collection need look through it
        config = folder.pinned(config)
        finished = folder.check(config)
        download(config, console, finished)
        found = look(config, finished, plan_only=True)
        with PlotProcess() as plots:
            traced = trace(config, console, found)
            ready = plan(config, console, traced, plan_only=True)
            if config.plan.advise and found.pool is None and not verifies(config):
                ready = advised(ready, config, traced, self.compose, console)
            with folder.claim(config) as home:
                if home.finished_steps and not home.created:
                    _log.warning(f"the settings, plan and summary of run {home.id} are replaced")
                write_plan(home, config, ready.plan)
                planned = write_planned(home, config, ready.plan, ready.plan_seconds, plots)
        if planned.predicted_cost is not None:
            steps, cost = config.train.steps, planned.predicted_cost
            console.print(f"{steps} steps: predicted cost {cost:,.2f}", soft_wrap=True)
        took, note = expected_text(planned)
        console.print(f"expected: {took} ({note})", soft_wrap=True)
        console.print(f"\nthe plan is in {home.path / 'plan.json'}", soft_wrap=True)
        console.print(f"its timeline is in {home.path / TIMELINE}", soft_wrap=True)
        console.print(f"its report is in {home.path / REPORT}", soft_wrap=True)
        if ready.problem:
            raise UnfitError(ready.problem, exit_code=1)
        return 0


class TrainTask(TaskKind):
    """Train, while Ray and the workers start beside planning."""

    name, interruptible = "train", False

    def run(self, config: Config, console: RunConsole) -> int:
        """Train from the newest checkpoint to the last step; return the exit code."""
        stop, rendezvous = self.stop, self.rendezvous
        say, steps = line_printer(console), config.train.steps
        with stop.interruptible():
            for hook in config.hooks:
                find_hook(hook)  # a wrong one fails before anything starts
            bring_back(config, console)
            config = folder.pinned(config)
            finished = folder.check(config)
            if finished < steps:
                download(config, console, finished)
                prepare_first(config, console)
            found = look(config, finished) if finished < steps else None
        if found is None:
            _log.info(
                f"run {config.run.id} is complete, {finished} of {steps} steps; to train further, "
                "raise train.steps"
            )
            if rendezvous is not None:
                release_nodes(rendezvous)
            if config.run.mirror is not None:
                with folder.claim(config) as home, mirroring(config, home, console, stop):
                    pass  # it may have ended before all was mirrored
            return 0
        with ExitStack() as stack:
            with stop.heeded(say, until="now"):  # it reads checkpoints
                home = stack.enter_context(folder.claim(config))
            allocation = rendezvous.allocation if rendezvous else None
            shown = Status(home.path, steps, allocation.job_id if allocation else None)
            console.phases = (shown.phase,)
            with folder.delete_on_error(home.created), ExitStack() as opening:
                own(config, home)
                home = replace(home, status=opening.enter_context(shown))
                session = None
                if rendezvous is None and _can_start_early(config, found):
                    with stop.heeded(say, _LEAVES):  # no process is left without an owner
                        session = opening.enter_context(_start_ray(config, home, found, stop))
                        stop.check()
                ready = _trace_and_plan(config, home, found, console, session, stop)
                stack.push(opening.pop_all())
            from launcher.driver.training import train_in

            stack.enter_context(stop.heeded(say, _LEAVES))
            return train_in(home, config, ready, console, stop, rendezvous, session)


class Preflight(TrainTask):
    """Do what a training does in its first seconds, up to the comparison of its hosts."""

    name = "preflight"


def _trace_and_plan(
    config: Config,
    home: RunFolder,
    found: Inputs,
    console: Console,
    session: RaySession | None,
    stop: Stop,
) -> Prepared:
    """Trace and plan while Ray and then the workers start, if there is a session."""
    with stop.interruptible():
        from launcher.driver.planning.prepare import plan, trace
        from launcher.runtime import why_not_kept

        if problem := why_not_kept():  # the workers' own warnings are only in their logs
            _log.warning(problem)
        traced = trace(config, console, found, measures=True)
    if session is not None:
        with stop.heeded(line_printer(console), _LEAVES):
            _start_workers(session, config, home)
    with stop.interruptible():
        return plan(config, console, traced)


def _can_start_early(config: Config, found: Inputs) -> bool:
    """Return whether Ray and the workers can start while the run is traced and planned.

    That is worth it if tracing and planning can hardly fail after the checks, and if they measure
    nothing, which the start would disturb.
    """
    if not kind_of(config.cluster).starts_early:
        return False
    measures = isinstance(config.parallel, Planned) and config.parallel.cost == "profile"
    if config.is_users or measures:
        return False
    return found.pool is None or not measures_first(config) or is_kept(found.pool)


def _start_ray(config: Config, home: RunFolder, found: Inputs, stop: Stop) -> RaySession:
    assert found.pool is not None
    home.logs.mkdir(exist_ok=True)
    seconds = machines_of(config.cluster).start_timeout
    limit = StartLimit(seconds, check=stop.check)
    return kind_of(config.cluster).start(found.pool, home.logs, limit)


def _start_workers(session: RaySession, config: Config, home: RunFolder) -> None:
    """Start the workers; a single worker traces at once, several must join first."""
    from launcher.train.worker import TrainWorker

    with suppress(ClusterError):  # the run meets the error again
        workers = session.begin(TrainWorker)
        if len(workers) == 1:
            named = replace(config, run=replace(config.run, id=home.id))
            capability = pool_shape(session.pool).compute_capability
            workers[0].submit("build", to_dict(named), capability, str(home.path.absolute()))
