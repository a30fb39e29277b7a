"""A training run in its folder: start the workers, run the loop, restart after a failure."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from rich.console import Console

from launcher import checkpoint
from launcher.base import complain, lines_to
from launcher.checkpoint import SaveError
from launcher.cluster.errors import ClusterError, WorkerError
from launcher.cluster.kinds import kind_of
from launcher.cluster.ray.session import RaySession
from launcher.cluster.ray.waiting import StartLimit
from launcher.cluster.slurm.attempts import begin, finish
from launcher.cluster.slurm.rendezvous import Rendezvous, reopened
from launcher.config.cluster import machines_of
from launcher.config.compose import to_dict
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.driver.failures import (
    FailedError,
    Failure,
    Restart,
    failure_of,
    restart_text,
    run_with_restarts,
)
from launcher.driver.folder import folder
from launcher.driver.folder.folder import RunFolder
from launcher.driver.folder.plan_files import current_folder, write_plan, write_plan_alone
from launcher.driver.loop import train
from launcher.driver.planning.candidates import knows_trials, of_run
from launcher.driver.planning.prepare import Prepared
from launcher.driver.record.recorder import DivergedError
from launcher.driver.record.run_log import RunLog
from launcher.driver.saving import Saving, contents, resuming
from launcher.driver.tries import Tries
from launcher.driver.workers import Answers, Workers, compile_everywhere, create_everywhere
from launcher.plan import Plan, describe_plan
from launcher.recipes import fingerprint_dataset
from launcher.report.console import Phase, line_printer, status
from launcher.report.jsonl import METRICS, read_metrics
from launcher.report.plan_table import print_plan
from launcher.runtime import ReplicaError
from launcher.stop import Stop
from launcher.train.worker import TrainWorker


def train_in(
    home: RunFolder,
    config: Config,
    ready: Prepared,
    console: Console,
    stop: Stop,
    rendezvous: Rendezvous | None = None,
    session: RaySession | None = None,
) -> int:
    """Train in the folder `home`, from its newest checkpoint on.

    However it ends, no process is left behind and `summary.json` gives the reason.

    Args:
        home: the run's folder, claimed by this process.
        config: checked settings.
        ready: the devices and the plan.
        console: where progress is shown.
        stop: the signals received.
        rendezvous: with the other tasks of a Slurm job, whose attempts have logs of their own.
        session: a Ray that is already started; the first attempt takes it and closes it.

    Returns:
        The exit code.

    Raises:
        ClusterError: the workers could not be started.
        WorkerError: a worker raised an exception.
        DivergedError: the loss or the gradient norm is not finite.
        ReplicaError: replicas of the state differ.
        SaveError: a save failed, and that ends the run.
        FailedError: the run failed and is not restarted.
        KeyboardInterrupt: the user ended it.
        OSError: the run's folder cannot be written.
    """
    config = replace(config, run=replace(config.run, id=home.id))
    attempt = None
    if rendezvous is not None:
        last_step = _last_step(home)
        with lines_to(complain):
            attempt = begin(home.path, rendezvous.allocation, last_step, home.finished_steps)
        home = replace(home, attempt=attempt.number)
    if home.finished_steps and ready.candidates:  # it has chosen before
        chosen = of_run(home.path, ready.candidates) or ready.plan
        ready = replace(ready, plan=chosen, candidates=())
    job = _Job(home, config, ready, console, rendezvous, session)
    code, reason = 1, "failed"
    try:  # from here on the attempt's end is recorded, even on a full disk
        (home.path / "summary.json").unlink(missing_ok=True)
        home.logs.mkdir(exist_ok=True)
        write_plan(home, config, ready.plan)
        job.train(stop)
        home.check()
        code, reason = 0, "done"
        if stop.requested and job.run_log.recorder.finished_steps < config.train.steps:
            code, reason = stop.ending
        reason = job.run_log.best.reason or reason
        return code
    except KeyboardInterrupt:
        code, reason = stop.ending
        # Fast: compares names and sizes only, and cleans nothing up.
        saved = checkpoint.newest(home.checkpoints, thorough=False).step or 0
        if saved < job.run_log.recorder.finished_steps:
            reason += f", not saved since step {saved}"
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise
    finally:
        try:
            path = current_folder(home, config, job.plan)
            if attempt is not None:
                step = max(home.finished_steps, job.run_log.recorder.finished_steps)
                finish(path, attempt, code, reason, step)
            job.run_log.sum_up(reason, job.restarts, path)
        except OSError as error:  # on a full disk, report what ended the run, not this
            if code == 0:
                raise
            complain(f"the end of the run is not recorded: {error}")


def _last_step(home: RunFolder) -> int:
    """Return the newest recorded step; after a crash it is later than the newest checkpoint."""
    records = read_metrics(home.path / METRICS)
    return int(max([home.finished_steps, *(record["step"] for record in records)]))


_log = logging.getLogger(__name__)

_SAVING = "finishing this step and saving; Ctrl-C once more leaves at once, unsaved"


class _Job:
    """A run in progress, over all its attempts.

    Attributes:
        plan: the run's plan; until several are tried, the best by its prediction.
        run_log: the record of all attempts.
        restarts: how many attempts came before this one.
    """

    def __init__(
        self,
        home: RunFolder,
        config: Config,
        ready: Prepared,
        console: Console,
        rendezvous: Rendezvous | None,
        session: RaySession | None = None,
    ) -> None:
        self._home, self._config, self._console = home, config, console
        self._say = line_printer(console)
        assert ready.pool is not None, "nothing to train on"
        self._rendezvous, self._pool, self._session = rendezvous, ready.pool, session
        self._plan_seconds = ready.plan_seconds
        plans = ready.candidates
        self._tries = Tries(plans, console, knows_trials(config)) if plans else None
        self._go_by(ready.plan)
        self.restarts = 0
        self._init_from = str(ready.init_from) if ready.init_from else None
        self._settings = replace(config.train, eval_batches=ready.eval_batches)
        # After a roll-back: its step and the index of the next batch.
        self._rolled_back: tuple[int, int] | None = None
        self._passed_over = 0  # the offset of a batch's index from its step's

    def _go_by(self, plan: Plan) -> None:
        """Take a plan; before a step is made, as the record begins anew."""
        allocation = self._rendezvous.allocation if self._rendezvous else None
        about = plan, self._plan_seconds, self._console, allocation
        self.plan, self.run_log = plan, RunLog(self._home, self._config, *about)

    def train(self, stop: Stop) -> None:
        """Train to the end; after a failure that a restart may mend, resume from a checkpoint.

        Raises:
            FailedError: there are no more restarts.
            Exception: what no restart can mend.
        """

        def max_restarts() -> int:
            return 0 if stop.requested else machines_of(self._config.cluster).max_restarts

        def sleep(seconds: float) -> None:
            with self._interruptible(stop):
                time.sleep(seconds)

        attempt = functools.partial(self._attempt, stop)
        prepare_restart = functools.partial(self._prepare_restart, stop)
        run_with_restarts(attempt, self._diagnose, prepare_restart, max_restarts, sleep)

    def _attempt(self, stop: Stop) -> None:
        """Start the workers, train, save, and stop the workers."""
        finished, steps = self._home.finished_steps, self._config.train.steps
        if finished >= steps:  # the attempt before failed after its last step
            return
        self._passed_over = self._stored_position() - finished
        for line in self._home.damaged:
            _log.warning(line)
        if finished:
            _log.info(resuming(self._home.id, self._home.checkpoints, finished))
        with ExitStack() as stack:
            with status(self._console, "starting Ray and the workers", Phase.STARTING) as advance:
                session = stack.enter_context(self._start(stop))
                cluster = machines_of(self._config.cluster)
                handles = session.spawn(TrainWorker, advance=advance)

                def check() -> None:
                    session.check()
                    stop.check()

                transport = getattr(cluster, "transport", "auto")
                reduction = self.plan.reduction
                servers = session.serve(reduction.servers, reduction.workers)
                timeout = cluster.step_timeout
                workers = Workers(handles, self.plan, check, timeout, transport, servers)
                workers.connect(advance)
            built = workers.submit("build", to_dict(self._config))
            if goes_on := self._tried(workers, built):
                self._train_on(workers, built, finished, stop)
        if not goes_on:  # a plan that was tried has ended the workers
            self._attempt(stop)

    def _tried(self, workers: Workers, built: Answers) -> bool:
        """Try plans, if that is still to be done; return whether the workers can continue."""
        if self._tries is None:
            return True
        built.result()
        if not self._tries.run(workers):
            return False
        chosen = self._tries.choose()
        if describe_plan(chosen) != describe_plan(self.plan):
            print_plan(self._console, chosen)
        self._go_by(chosen)
        workers.plan, self._tries = self.plan, None
        return True

    def _train_on(self, workers: Workers, built: Answers, finished: int, stop: Stop) -> None:
        """Train by the plan, save, and close the workers."""
        begun = workers.submit("begin_setup", self.plan.to_dict())
        with self._interruptible(stop):  # may wait for the network
            self.run_log.open(finished)  # while the worker traces and compiles
        with status(self._console, "compiling", Phase.COMPILING) as advance:
            built.result(advance)
            self.run_log.compile_seconds = compile_everywhere(workers, begun, advance)
            self._home.check()
            processes = workers.submit("process").each()
            infos = workers.infos(processes, self._pool.devices_per_host)
            write_plan_alone(self._home, replace(self.plan, workers=tuple(infos)))
            if not finished:
                create_everywhere(workers, self._init_from)
        if finished:
            with status(self._console, "reading the checkpoint", Phase.READING) as advance:
                workers.submit("restore", self._checkpoints, finished).result(advance)
        with status(self._console, "reading the first batch", Phase.READING) as advance:
            if self._passed_over:
                workers.submit("pass_over", self._passed_over, finished).result(advance)
            workers.submit("first_batch", finished + 1).result(advance)
        if dry_steps := self._config.train.dry_steps:
            with status(self._console, "warming up", Phase.WARMING_UP):
                for _ in range(dry_steps):
                    workers.submit("dry_step", finished + 1).result()
        timelines = self.run_log.recorder.timelines
        if timelines and any(step > finished for step in timelines.steps):
            timelines.begin(workers.clocks())
        self.run_log.show(finished)
        with stop.heeded(self._say, _SAVING, until="done"):
            save = self._saving(workers)
            try:
                train(self._settings, workers, self.run_log.recorder, stop, finished, save)
            except (DivergedError, ReplicaError):
                with suppress(SaveError):
                    save.finish(final=False)  # the save of an earlier step
                raise
            with suppress(WorkerError, ClusterError):  # all is done and saved
                workers.submit("close").result()

    def _start(self, stop: Stop) -> RaySession:
        session, self._session = self._session, None
        if session is not None:
            return session
        cluster = machines_of(self._config.cluster)
        limit = StartLimit(cluster.start_timeout, check=stop.check)
        return kind_of(cluster).start(self._pool, self._home.logs, limit, self._rendezvous)

    def _diagnose(self, error: Exception) -> Failure | None:
        train, step = self._config.train, self.run_log.recorder.finished_steps
        rolls_back = train.non_finite == "rollback"
        return failure_of(error, step, train.steps, self.plan, rolls_back)

    def _prepare_restart(self, stop: Stop, failure: Failure, restart: Restart) -> None:
        self.restarts = restart.number
        self._rendezvous = self._rendezvous and reopened(self._rendezvous)
        try:
            with self._interruptible(stop):  # it reads checkpoints
                self._home = folder.reload(self._home, self._config)
        except (ConfigError, OSError) as error:  # not a wrong setting, as the run had begun
            raise FailedError(f"{failure.report}\nThe run is not restarted: {error}") from None
        limit = machines_of(self._config.cluster).max_restarts
        finished = self._home.finished_steps
        if failure.passes_over:
            self._rolled_back = finished, failure.step + self._passed_over
        text = restart_text(failure, restart, limit, finished)
        complain(text)
        self.run_log.close(finished, text)

    def _stored_position(self) -> int:
        """Return the index of the next batch after the newest checkpoint or a roll-back to it."""
        finished = self._home.finished_steps
        if self._rolled_back and self._rolled_back[0] == finished:
            return self._rolled_back[1]
        return self._home.next_batch

    @contextmanager
    def _interruptible(self, stop: Stop) -> Iterator[None]:
        """End at once on a signal: for work that may take long and needs no cleaning up."""
        with stop.heeded(self._say, until="now"):
            stop.check()
            yield

    @property
    def _checkpoints(self) -> str:
        return str(self._home.checkpoints.absolute())

    def _saving(self, workers: Workers) -> Saving:
        data, passed = fingerprint_dataset(self._config.dataset), self._passed_over
        describe = functools.partial(
            contents, self._config, self.plan, passed_over=passed, data=data
        )
        settings, failures = self._config.train.checkpoint, self.run_log.failed_saves
        folder, log = self._home.checkpoints, self.run_log
        return Saving(workers, folder, settings, describe, failures, log.sync, log.saved)
