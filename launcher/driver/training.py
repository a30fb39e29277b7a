"""One training run in its folder: workers, loop, and another start after a failure. `run` calls
it; `run_log` keeps the account.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import yaml
from rich.console import Console

from launcher.cluster.errors import ClusterError, WorkerError
from launcher.cluster.ray.private_ray import PrivateRay, start
from launcher.cluster.ray.waiting import Patience
from launcher.cluster.slurm.attempts import begin, finish
from launcher.cluster.slurm.rendezvous import Rendezvous, reopened
from launcher.config.compose import to_dict, to_written
from launcher.config.errors import ConfigError
from launcher.config.machines import Hosts, SlurmCluster, machines_of
from launcher.config.schema import Config
from launcher.driver import folder
from launcher.driver.folder import LOCK, RunFolder
from launcher.driver.held import LostFolderError
from launcher.driver.incident import failure_of, restart_text
from launcher.driver.loop import train
from launcher.driver.prepare import Prepared
from launcher.driver.recorder import DivergedError
from launcher.driver.restart_policy import FailedError, Failure, Restart, recovering
from launcher.driver.run_log import METRICS, RunLog
from launcher.driver.saving import Saving, contents
from launcher.driver.workers import Workers
from launcher.files import aside, write_whole
from launcher.output import complain
from launcher.plan import Plan
from launcher.report.console import status
from launcher.report.jsonl import read_metrics
from launcher.report.summary import shown_path
from launcher.stop import Stop
from launcher.train import checkpoint
from launcher.train.checkpoint import SaveError
from launcher.train.worker import TrainWorker


def train_in(
    home: RunFolder,
    config: Config,
    ready: Prepared,
    console: Console,
    stop: Stop,
    rendezvous: Rendezvous | None = None,
    session: PrivateRay | None = None,
) -> int:
    """Train in the folder `home`, from where its checkpoint left off; returns the exit code.

    In a Slurm job, where there is a `rendezvous`, it is an attempt with logs of its own. The first
    start takes the `session` that `run` has begun, if there is one, and closes it. Whatever
    happens, no process stays behind and `summary.json` says how the run ended. Raises ClusterError,
    WorkerError, DivergedError, SaveError, FailedError, KeyboardInterrupt and OSError.
    """
    config = replace(config, run=replace(config.run, id=home.id))
    attempt = None
    if rendezvous is not None:
        attempt = begin(
            home.path, rendezvous.allocation, _last_step(home), complain, home.finished_steps
        )
        home = replace(home, attempt=attempt.number)
    job = _Job(home, config, ready, console, rendezvous, session)
    recorder = job.run_log.recorder
    code, reason = 1, "failed"
    try:  # from here on the attempt has an account of its end, also on a full disk
        (home.path / "summary.json").unlink(missing_ok=True)
        home.logs.mkdir(exist_ok=True)
        write_plan(home, config, ready.plan)
        job.train(stop)
        home.check()
        code, reason = 0, "done"
        if stop.requested and recorder.finished_steps < config.train.steps:
            code, reason = stop.ending
        return code
    except KeyboardInterrupt:
        code, reason = stop.ending
        # At once: by the names and sizes alone, and with nothing tidied up.
        saved = checkpoint.newest(home.checkpoints, thorough=False).step or 0
        if saved < recorder.finished_steps:
            reason += f", not saved since step {saved}"
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise
    finally:
        try:
            path = _found(home, config, ready.plan)
            if attempt is not None:
                step = max(home.finished_steps, recorder.finished_steps)
                finish(path, attempt, code, reason, step)
            job.run_log.sum_up(reason, job.restarts, path)
        except OSError as error:  # on a full disk, what ended the run is what has to be told
            if code == 0:
                raise
            complain(f"the end of the run is not recorded: {error}")


def _found(home: RunFolder, config: Config, plan: Plan) -> Path:
    """Where the run's folder is by now. One that was deleted is made again, for what this process
    still knows: a command that was meant for another folder does not cost the metrics."""
    if home.held is None:
        return home.path
    try:
        home.check()
        return home.path
    except LostFolderError:
        if (path := home.held.found()) is not None:
            return path
    path = home.path if not (home.path / LOCK).exists() else aside(home.path)  # another run's
    path.mkdir(parents=True, exist_ok=True)
    write_plan(replace(home, path=path), config, plan)
    complain(f"settings, plan and metrics of the run are written again, to {path}")
    return path


def write_plan(home: RunFolder, config: Config, plan: Plan) -> None:
    """Write what the run is to be: `config.yaml`, resolved but for variables, and `plan.json`."""
    tree = to_written(replace(config, run=replace(config.run, id=home.id)))
    tree["run"]["dir"] = config.run.dir  # where this is, whatever a job's variables say
    # Whole or not at all: another task of a Slurm job may be reading them.
    cluster = config.cluster
    private = isinstance(cluster, SlurmCluster) and bool(cluster.slurm.env)  # may be secrets
    write_whole(home.path / "config.yaml", yaml.safe_dump(tree, sort_keys=False), private)
    write_whole(home.path / "plan.json", json.dumps(plan.to_dict(), indent=2) + "\n")


def _last_step(home: RunFolder) -> int:
    """The newest step that is recorded; further than the newest checkpoint after a crash."""
    records = read_metrics(home.path / METRICS)
    return max([home.finished_steps, *(record["step"] for record in records)])


_SAVING = "finishing this step and saving; Ctrl-C once more leaves at once, unsaved"


class _Job:
    """A run under way, attempt after attempt.

    Attributes:
        run_log: of all attempts. restarts: how many attempts there were before this one.
    """

    def __init__(
        self,
        home: RunFolder,
        config: Config,
        ready: Prepared,
        console: Console,
        rendezvous: Rendezvous | None,
        session: PrivateRay | None = None,
    ) -> None:
        self._home, self._config, self._console = home, config, console
        assert ready.pool is not None, "nothing to train on"
        self._rendezvous, self._pool, self._plan = rendezvous, ready.pool, ready.plan
        self._session = session
        allocation = rendezvous.allocation if rendezvous else None
        self.run_log = RunLog(home, config, ready.plan, ready.plan_seconds, console, allocation)
        self.restarts = 0
        self._init_from = str(ready.init_from) if ready.init_from else None
        # After a roll-back: to which step, and which batch is next.
        self._rolled_back: tuple[int, int] | None = None
        self._passed_over = 0  # how much further on in the data a batch is than its step's number

    def train(self, stop: Stop) -> None:
        """Train to the end; after a failure that another start may mend, go on from the newest
        checkpoint. Raises what cannot be mended, or FailedError."""

        def max_restarts() -> int:
            return 0 if stop.requested else machines_of(self._config.cluster).max_restarts

        def sleep(seconds: float) -> None:
            with self._left_at_once(stop):
                time.sleep(seconds)

        attempt = functools.partial(self._attempt, stop)
        begin_again = functools.partial(self._begin_again, stop)
        recovering(attempt, self._diagnose, begin_again, max_restarts, sleep)

    def _attempt(self, stop: Stop) -> None:
        """Bring the workers up, train, save, take them down."""
        finished, steps = self._home.finished_steps, self._config.train.steps
        if finished >= steps:  # an attempt before failed when all was done
            return
        self._passed_over = self._stored_position() - finished
        for line in self._home.damaged:
            self._say(line)
        if finished:
            path = shown_path(self._home.checkpoints / str(finished))
            self._say(f"resuming run {self._home.id} at step {finished} from {path}")
        with ExitStack() as stack:
            with status(self._console, "starting Ray and the workers"):
                session = stack.enter_context(self._start(stop))
                cluster = machines_of(self._config.cluster)
                handles = session.spawn(TrainWorker)

                def check() -> None:
                    session.check()
                    stop.check()

                transport = cluster.transport if isinstance(cluster, Hosts) else "auto"
                workers = Workers(handles, self._plan, check, cluster.step_timeout, transport)
                workers.join()
            built = workers.submit("build", to_dict(self._config))
            setup = workers.submit("setup", self._plan.to_dict())
            with self._left_at_once(stop):  # which may wait for a network
                self.run_log.open(finished)  # while the worker traces and compiles
            with status(self._console, "compiling"):
                built.result()
                self.run_log.compile_seconds = setup.result()
                if finished:
                    workers.submit("restore", self._checkpoints, finished).result()
                else:
                    workers.submit("create", self._init_from).result()
                if self._passed_over:
                    workers.submit("pass_over", self._passed_over, finished).result()
            self.run_log.show(finished)
            with stop.heeded(self._say, _SAVING, until="done"):
                save = self._saving(workers)
                try:
                    train(self._config.train, workers, self.run_log.recorder, stop, finished, save)
                except DivergedError:
                    with suppress(SaveError):
                        save.finish(final=False)  # of the steps before
                    raise
                with suppress(WorkerError, ClusterError):  # all is done and saved
                    workers.submit("close").result()

    def _start(self, stop: Stop) -> PrivateRay:
        session, self._session = self._session, None
        if session is not None:
            return session
        limit = machines_of(self._config.cluster).start_timeout
        patience = Patience(limit, say=self._say, check=stop.check)
        return start(self._pool, self._home.logs, self._rendezvous, patience)

    def _diagnose(self, error: Exception) -> Failure | None:
        train, step = self._config.train, self.run_log.recorder.finished_steps
        rolls_back = train.non_finite == "rollback"
        return failure_of(error, step, train.steps, self._plan, rolls_back)

    def _begin_again(self, stop: Stop, failure: Failure, restart: Restart) -> None:
        self.restarts = restart.number
        self._rendezvous = self._rendezvous and reopened(self._rendezvous)
        try:
            with self._left_at_once(stop):  # it reads checkpoints
                self._home = folder.again(self._home, self._config)
        except (ConfigError, OSError) as error:  # no wrong setting: the run had begun
            raise FailedError(f"{failure.report}\nThe run is not started again: {error}") from None
        limit = machines_of(self._config.cluster).max_restarts
        finished = self._home.finished_steps
        if failure.passes_over:
            self._rolled_back = finished, failure.step + self._passed_over
        self.run_log.close(finished)
        complain(restart_text(failure, restart, limit, finished))

    def _stored_position(self) -> int:
        """Which batch is next, from 0: after the newest checkpoint, or after a roll-back to it."""
        finished = self._home.finished_steps
        if self._rolled_back and self._rolled_back[0] == finished:
            return self._rolled_back[1]
        return self._home.next_batch

    @contextmanager
    def _left_at_once(self, stop: Stop) -> Iterator[None]:
        """For work that may last, and that nobody has to end in good order."""
        with stop.heeded(self._say, until="now"):
            stop.check()
            yield

    @property
    def _checkpoints(self) -> str:
        return str(self._home.checkpoints.absolute())

    def _saving(self, workers: Workers) -> Saving:
        describe = functools.partial(
            contents, self._config, self._plan, passed_over=self._passed_over
        )
        settings, failures = self._config.train.checkpoint, self.run_log.failed_saves
        sync = self.run_log.sync
        return Saving(
            workers, self._home.checkpoints, settings, describe, self._say, failures, sync
        )

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)
