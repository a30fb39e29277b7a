"""A whole run in the driver, from checked settings to an exit code. `launcher.command` calls it.

The driver plans and directs; it computes nothing itself. Here stands what is done for which task,
and what is said, and with which exit code, where it cannot be done. JAX takes a second to import,
so it is imported where it is needed, when Ray is on its way up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from launcher.cluster.errors import ClusterError, WorkerError
from launcher.cluster.ray.private_ray import PrivateRay, start
from launcher.cluster.ray.waiting import Patience
from launcher.cluster.slurm.rendezvous import Rendezvous, release_nodes
from launcher.config.compose import to_dict
from launcher.config.errors import ConfigError
from launcher.config.machines import machines_of
from launcher.config.parallel import Planned
from launcher.config.schema import Config, CustomDataset, CustomModel
from launcher.driver import folder
from launcher.driver.check import Found, look, os_error_text
from launcher.driver.folder import RunFolder
from launcher.output import complain
from launcher.report.console import make_console
from launcher.stop import Stop
from recipes import InputError

if TYPE_CHECKING:
    from launcher.driver.prepare import Prepared

_LEAVES = "Ctrl-C once more leaves at once"


def run(config: Config, stop: Stop, rendezvous: Rendezvous | None = None) -> int:
    """Do `config.task`, "train", "plan" or "calibrate", and return the exit code of the process.

    `rendezvous` is with the other tasks of the Slurm job that this process is a task of. What goes
    wrong is said on standard error. The main thread only, and once a process. Raises
    KeyboardInterrupt where a signal ends it, as `stop` knows.
    """

    def work() -> int:
        if config.task == "train":
            return _train(config, stop, rendezvous)
        from launcher.driver.calibrate import calibrate

        with stop.interruptible():
            if config.task == "calibrate":
                return calibrate(config.cluster, make_console())
            return _plan(config)

    return guarded(work)


def guarded(work: Callable[[], int]) -> int:
    """The exit code of `work`, or of what goes wrong in it, which is said on standard error."""
    try:
        return work()
    except (ConfigError, InputError) as error:
        message, code = str(error), 2
    except OSError as error:
        message, code = os_error_text(error), 1
    except (ClusterError, WorkerError) as error:
        message, code = str(error), 1
    except Exception as error:
        from launcher.driver.recorder import DivergedError
        from launcher.driver.restart_policy import FailedError
        from launcher.plan import PlanError
        from launcher.trace import TraceError

        if not isinstance(error, TraceError | PlanError | DivergedError | FailedError):
            raise
        message, code = str(error), 2 if isinstance(error, TraceError | PlanError) else 1
    complain(message)
    return code


def _plan(config: Config) -> int:
    from launcher.driver.prepare import prepare
    from launcher.driver.run_log import write_planned
    from launcher.driver.training import write_plan

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


def _train(config: Config, stop: Stop, rendezvous: Rendezvous | None) -> int:
    console = make_console()
    say = functools.partial(console.print, soft_wrap=True)
    steps = config.train.steps
    with stop.interruptible():
        finished = folder.check(config)
        found = look(config, finished, say) if finished < steps else None
    if found is None:
        say(
            f"run {config.run.id} is complete, {finished} of {steps} steps; to go on with it, "
            "raise train.steps"
        )
        if rendezvous is not None:
            release_nodes(rendezvous)
        return 0
    with ExitStack() as stack:
        with stop.heeded(say, until="now"):  # it reads checkpoints
            home = stack.enter_context(folder.claim(config))
        with folder.unmade(home.made), ExitStack() as opening:
            session = None
            if rendezvous is None and _is_plain(config):
                with stop.heeded(say, _LEAVES):  # no process is left without an owner
                    session = opening.enter_context(_begun(config, home, found, say, stop))
                    stop.check()
            ready = _prepared(config, home, found, console, session, stop)
            stack.push(opening.pop_all())
        from launcher.driver.training import train_in

        stack.enter_context(stop.heeded(say, _LEAVES))
        return train_in(home, config, ready, console, stop, rendezvous, session)


def _prepared(
    config: Config,
    home: RunFolder,
    found: Found,
    console: Console,
    session: PrivateRay | None,
    stop: Stop,
) -> Prepared:
    """Trace and plan, while Ray comes up, if it was begun, and then the workers."""
    with stop.interruptible():
        from launcher.driver.prepare import plan, trace
        from launcher.runtime import why_not_kept

        if problem := why_not_kept():  # the workers' own words are in their logs
            console.print(problem, soft_wrap=True)
        traced = trace(config, console, found)
    if session is not None:
        with stop.heeded(functools.partial(console.print, soft_wrap=True), _LEAVES):
            _begin_workers(session, config, home)
    with stop.interruptible():
        return plan(config, console, traced)


def _is_plain(config: Config) -> bool:
    """Whether next to nothing can be wrong with a run that was looked at, and nothing is measured
    for its plan: then Ray and the workers come up while it is traced and planned."""
    is_own = isinstance(config.model, CustomModel) or isinstance(config.dataset, CustomDataset)
    measures = isinstance(config.parallel, Planned) and config.parallel.cost == "profile"
    return not is_own and not measures


def _begun(
    config: Config, home: RunFolder, found: Found, say: Callable[[str], None], stop: Stop
) -> PrivateRay:
    assert found.pool is not None
    home.logs.mkdir(exist_ok=True)
    limit = machines_of(config.cluster).start_timeout
    patience = Patience(limit, say=say, check=stop.check)
    return start(found.pool, home.logs, patience=patience)


def _begin_workers(session: PrivateRay, config: Config, home: RunFolder) -> None:
    """Have the workers come up, and a worker that is alone trace; several meet first."""
    from launcher.train.worker import TrainWorker

    with suppress(ClusterError):  # which the run comes upon again
        workers = session.begin(TrainWorker)
        if len(workers) == 1:
            named = replace(config, run=replace(config.run, id=home.id))
            workers[0].submit("build", to_dict(named))
