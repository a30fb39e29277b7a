"""One training run in its folder: workers, loop, and another start after a failure. `run` calls
it; `recording` keeps the account.
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
from launcher.cluster.session import Session, start
from launcher.cluster.slurm_attempts import begin, finish
from launcher.cluster.slurm_meeting import Meeting, again
from launcher.cluster.waiting import Patience
from launcher.config.compose import to_dict, to_written
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.files import aside, write_whole
from launcher.output import complain
from launcher.plan import Plan
from launcher.report.console import status
from launcher.report.jsonl import read_metrics
from launcher.report.summary import shown_path
from launcher.stop import Stop
from launcher.train import checkpoint, folder
from launcher.train.checkpoint import SaveError
from launcher.train.crew import Crew
from launcher.train.folder import LOCK, RunFolder
from launcher.train.held import LostFolderError
from launcher.train.incident import failure_of, restart_text
from launcher.train.loop import train
from launcher.train.prepare import Prepared
from launcher.train.record import DivergedError
from launcher.train.recording import METRICS, Recording
from launcher.train.recovery import FailedError, Failure, Restart, recovering
from launcher.train.saving import Saving, contents
from launcher.train.worker import TrainWorker


def train_in(
    home: RunFolder,
    config: Config,
    ready: Prepared,
    console: Console,
    stop: Stop,
    meeting: Meeting | None = None,
    session: Session | None = None,
) -> int:
    """Train in the folder `home`, from where its checkpoint left off; returns the exit code.

    In a Slurm job, where there is a `meeting`, it is an attempt with logs of its own. The first
    start takes the `session` that `run` has begun, if there is one, and closes it. Whatever
    happens, no process stays behind and `summary.json` says how the run ended. Raises ClusterError,
    WorkerError, DivergedError, SaveError, FailedError, KeyboardInterrupt and OSError.
    """
    config = replace(config, run=replace(config.run, id=home.id))
    attempt = None
    if meeting is not None:
        attempt = begin(
            home.path, meeting.allocation, _last_step(home), complain, home.finished_steps
        )
        home = replace(home, attempt=attempt.number)
    job = _Job(home, config, ready, console, meeting, session)
    recorder = job.recording.recorder
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
            job.recording.sum_up(reason, job.restarts, path)
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
    private = bool(config.cluster.slurm.env)  # its values, which may be secrets, are in it
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
        recording: of all attempts. restarts: how many attempts there were before this one.
    """

    def __init__(
        self,
        home: RunFolder,
        config: Config,
        ready: Prepared,
        console: Console,
        meeting: Meeting | None,
        session: Session | None = None,
    ) -> None:
        self._home, self._config, self._console = home, config, console
        assert ready.pool is not None, "nothing to train on"
        self._meeting, self._pool, self._plan = meeting, ready.pool, ready.plan
        self._session = session
        allocation = meeting.allocation if meeting else None
        self.recording = Recording(
            home, config, ready.plan, ready.plan_seconds, console, allocation
        )
        self.restarts = 0
        self._init_from = str(ready.init_from) if ready.init_from else None
        # After a roll-back: to which step, and which batch is next.
        self._rolled_back: tuple[int, int] | None = None
        self._passed_over = 0  # how much further on in the data a batch is than its step's number

    def train(self, stop: Stop) -> None:
        """Train to the end; after a failure that another start may mend, go on from the newest
        checkpoint. Raises what cannot be mended, or FailedError."""

        def max_restarts() -> int:
            return 0 if stop.requested else self._config.cluster.max_restarts

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
                session, cluster = stack.enter_context(self._start(stop)), self._config.cluster
                workers = session.spawn(TrainWorker)

                def check() -> None:
                    session.check()
                    stop.check()

                crew = Crew(workers, self._plan, check, cluster.step_timeout, cluster.transport)
                crew.join()
            built = crew.submit("build", to_dict(self._config))
            setup = crew.submit("setup", self._plan.to_dict())
            with self._left_at_once(stop):  # which may wait for a network
                self.recording.open(finished)  # while the worker traces and compiles
            with status(self._console, "compiling"):
                built.result()
                self.recording.compile_seconds = setup.result()
                if finished:
                    crew.submit("restore", self._checkpoints, finished).result()
                else:
                    crew.submit("create", self._init_from).result()
                if self._passed_over:
                    crew.submit("pass_over", self._passed_over, finished).result()
            self.recording.show(finished)
            with stop.heeded(self._say, _SAVING, until="done"):
                save = self._saving(crew)
                try:
                    train(self._config.train, crew, self.recording.recorder, stop, finished, save)
                except DivergedError:
                    with suppress(SaveError):
                        save.finish(final=False)  # of the steps before
                    raise
                with suppress(WorkerError, ClusterError):  # all is done and saved
                    crew.submit("close").result()

    def _start(self, stop: Stop) -> Session:
        session, self._session = self._session, None
        if session is not None:
            return session
        patience = Patience(self._config.cluster.start_timeout, say=self._say, check=stop.check)
        return start(self._pool, self._home.logs, self._meeting, patience)

    def _diagnose(self, error: Exception) -> Failure | None:
        train, step = self._config.train, self.recording.recorder.finished_steps
        rolls_back = train.non_finite == "rollback"
        return failure_of(error, step, train.steps, self._plan, rolls_back)

    def _begin_again(self, stop: Stop, failure: Failure, restart: Restart) -> None:
        self.restarts = restart.number
        self._meeting = self._meeting and again(self._meeting)
        try:
            with self._left_at_once(stop):  # it reads checkpoints
                self._home = folder.again(self._home, self._config)
        except (ConfigError, OSError) as error:  # no wrong setting: the run had begun
            raise FailedError(f"{failure.report}\nThe run is not started again: {error}") from None
        limit, finished = self._config.cluster.max_restarts, self._home.finished_steps
        if failure.passes_over:
            self._rolled_back = finished, failure.step + self._passed_over
        self.recording.close(finished)
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

    def _saving(self, crew: Crew) -> Saving:
        describe = functools.partial(
            contents, self._config, self._plan, passed_over=self._passed_over
        )
        settings, failures = self._config.train.checkpoint, self.recording.failed_saves
        sync = self.recording.sync
        return Saving(crew, self._home.checkpoints, settings, describe, self._say, failures, sync)

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)
