"""A training run in its folder: start the workers, try plans, run the loop, restart."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from rich.console import Console

from launcher import checkpoint
from launcher.base import Advance, complain, first_line, held_back, lines_to, to_type
from launcher.checkpoint import SaveError
from launcher.cluster.errors import ClusterError, HungError, WorkerError
from launcher.cluster.kinds import kind_of, pool_shape
from launcher.cluster.ray.session import RaySession, StartLimit
from launcher.cluster.slurm.allocation import begin, finish
from launcher.cluster.slurm.rendezvous import Rendezvous, reopened
from launcher.config.cluster import machines_of
from launcher.config.compose import to_dict
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.driver import in_memory
from launcher.driver.callback import Callback
from launcher.driver.failures import (
    FailedError,
    Failure,
    PassedOver,
    Restart,
    failure_of,
    restart_text,
    run_with_restarts,
)
from launcher.driver.folder import folder
from launcher.driver.folder.folder import RunFolder, current_folder, write_plan, write_plan_alone
from launcher.driver.folder.mirrored import fetch_older, go_back, mirroring
from launcher.driver.loop import Saving, SnapshotCadence, resuming, train
from launcher.driver.planning.fewer_hosts import loss_of_a_host, on_what_is_left
from launcher.driver.planning.prepare import Prepared, knows_trials, of_run
from launcher.driver.record.run_log import RunLog
from launcher.driver.record.step_log import DivergedError, SpikeError
from launcher.driver.tries import Tries
from launcher.driver.workers import Answers, Workers, compile_everywhere, create_everywhere
from launcher.hardware import differing_versions, shortages
from launcher.plan import Plan, PlanError, describe_plan
from launcher.recipes import fingerprint_dataset
from launcher.report.console import Phase, line_printer, status
from launcher.report.jsonl import METRICS, read_metrics
from launcher.report.plan_table import print_plan
from launcher.report.text import seconds_text
from launcher.runtime import ReplicaError
from launcher.stop import Stop
from launcher.train import LAG, batch_index
from launcher.train.worker import TrainWorker

_SAVING = "finishing this step and saving; Ctrl-C once more leaves at once, unsaved"
_STANDBYS = 2  # on a host

_log = logging.getLogger(__name__)


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
    config = replace(config, run=replace(config.run, id=home.id, fork=home.forked_from))
    if rendezvous is not None:  # after a crash, the newest recorded step is after the checkpoint
        steps = [record["step"] for record in read_metrics(home.path / METRICS)]
        last_step = int(max([home.finished_steps, *steps]))
        with lines_to(complain):
            attempt = begin(home.path, rendezvous.allocation, last_step, home.finished_steps)
        home = replace(home, attempt=attempt.number)
    if home.finished_steps and ready.candidates:  # it has chosen before
        chosen = of_run(home.path, ready.candidates) or ready.plan
        ready = replace(ready, plan=chosen, candidates=())
    job = _Job(home, config, ready, console, stop, rendezvous, session)
    code, reason = 1, "failed"
    try:  # from here on the attempt's end is recorded, even on a full disk
        (home.path / "summary.json").unlink(missing_ok=True)
        home.logs.mkdir(exist_ok=True)
        write_plan(home, config, ready.plan)
        with mirroring(config, home, console, stop):
            job.train()
        home.check()
        code, reason = job.ending
        return code
    except KeyboardInterrupt:
        code, reason = stop.ending
        # Fast: compares names and sizes only, and cleans nothing up.
        saved = checkpoint.newest(home.checkpoints, thorough=False).step or 0
        if saved < job.recorded_steps:
            reason += f", not saved since step {saved}"
        raise
    except Exception as error:
        reason = first_line(error)
        raise
    finally:
        try:
            path = current_folder(home, config, job.plan)
            if rendezvous is not None:
                finish(path, attempt, code, reason, max(home.finished_steps, job.finished_steps))
            job.run_log.sum_up(reason, job.restarts, path)
        except OSError as error:  # on a full disk, report what ended the run, not this
            if code == 0:
                raise
            complain(f"the end of the run is not recorded: {error}")


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
        stop: Stop,
        rendezvous: Rendezvous | None,
        session: RaySession | None = None,
    ) -> None:
        self._home, self._config, self._ready, self._stop = home, config, ready, stop
        self._console, self._say = console, line_printer(console)
        self._rendezvous, self._session = rendezvous, session
        plans = ready.candidates
        self._tries = Tries(plans, console, knows_trials(config)) if plans else None
        self._standbys = Standbys()
        self._all = ready  # with the plan for all hosts
        self._there: int | None = None  # how many hosts the newest attempt had
        self._follow(ready.plan)
        self.restarts = 0
        self._rolled_back: dict[int, int] = {}  # the next batch by the step of a roll-back
        # A number of finished steps, and the index of the batch that comes then.
        self._anchor = home.finished_steps, home.next_batch
        self._left_out = PassedOver()
        self._sound = config.train.steps  # the newest step whose snapshot may be taken
        self._recorded = 0  # the newest step of the attempt before
        self._in_memory = False  # whether workers have kept snapshots since that attempt began
        self._since = 0  # the attempt after the newest roll-back; snapshots before it do not count
        self._held: in_memory.NewestState | None = None  # in memory, to resume from

    def _follow(self, plan: Plan) -> None:
        """Take a plan; before a step is made, as the record begins anew."""
        allocation = self._rendezvous.allocation if self._rendezvous else None
        about = plan, self._ready.plan_seconds, self._console, allocation
        self.plan, self.run_log = plan, RunLog(self._home, self._config, *about)
        self.run_log.step_log.callbacks.add(self._standbys)

    @property
    def finished_steps(self) -> int:
        """The newest finished step; 0 before the first one."""
        return self.run_log.step_log.finished_steps

    @property
    def recorded_steps(self) -> int:
        """The newest recorded step, also of the attempt before; it may be ahead of the state."""
        return max(self._recorded, self.finished_steps)

    @property
    def ending(self) -> tuple[int, str]:
        """The exit code and reason of a run that no error has ended."""
        code, reason = 0, "done"
        if self._stop.requested and self.finished_steps < self._config.train.steps:
            code, reason = self._stop.ending
        return code, self.run_log.best.reason or reason

    def train(self) -> None:
        """Train to the end; after a failure that a restart may mend, resume from a checkpoint.

        Raises:
            FailedError: there are no more restarts.
            Exception: what no restart can mend.
        """

        def max_restarts() -> int:
            return 0 if self._stop.requested else machines_of(self._config.cluster).max_restarts

        def sleep(seconds: float) -> None:
            with self._interruptible():
                time.sleep(seconds)

        attempt, prepare = self._attempt, self._prepare_restart
        try:
            run_with_restarts(attempt, self._diagnose, prepare, max_restarts, sleep)
        finally:
            if self._session is not None:
                self._session.close()

    def _attempt(self) -> None:
        """Start the workers, train, save, and stop the workers."""
        finished, steps = self._home.finished_steps, self._config.train.steps
        if finished >= steps:  # the attempt before failed after its last step
            return
        began, is_compared = time.monotonic(), bool(self.restarts and self._session)
        with ExitStack() as stack:
            with status(self._console, "starting Ray and the workers", Phase.STARTING) as advance:
                session = stack.enter_context(self._ray())
                replanned = self._adapt(session, session.connect(advance))
                workers = self._start_workers(session, advance)
            is_preflight = self._config.task == "preflight"
            several = self._ready.pool and self._ready.pool.hosts > 1
            if is_preflight or (several and not is_compared):
                with status(self._console, "comparing the hosts", Phase.STARTING):
                    self._compare_hosts(workers, session.missing)
            if is_preflight:
                return
            finished = self._resumed(workers)
            if replanned:
                _log.warning(f"{replanned}; from step {finished}")
            assert self._ready.pool is not None
            capability = pool_shape(self._ready.pool).compute_capability
            about = to_dict(self._config), capability, str(self._home.path.absolute())
            built = workers.submit("build", *about)
            if usable := self._tried(workers, built):
                self._set_up(workers, built, finished)
                if self._renews(session) and machines_of(self._config.cluster).max_restarts:
                    places = workers.submit("locality").each()
                    begin = functools.partial(self._begin_standbys, session, places, about)
                    self._standbys.arm(time.monotonic() - began, begin)
                self._train_on(workers, finished)
        if not usable:  # a plan that was tried has ended the workers
            self._attempt()

    def _adapt(self, session: RaySession, left: int) -> str:
        """Take the plan for the hosts that are there; return in words what has changed.

        Raises:
            FailedError: there is no plan for so few.
        """
        whole, ready = self._all, self._ready
        assert whole.pool is not None
        asked, plan, self._there = whole.pool.hosts, whole.plan, left
        without = f", without {', '.join(session.missing)}" if session.missing else ""
        found = f"{left} of {asked} hosts {'are' if left > 1 else 'is'} left{without}"
        if left < asked and whole.on_fewer:
            try:
                with self._interruptible(), held_back():
                    plan = whole.on_fewer(left)
            except PlanError as error:
                raise FailedError(f"{found}: {error}") from None
            session.use(int(plan.cluster["hosts"]))
        if plan is ready.plan:
            return ""
        self._ready, self._tries = replace(ready, plan=plan, pool=session.pool), None
        self.plan = plan
        self.run_log.follow(plan)
        if left == asked:
            return f"all {asked} hosts are there again: {describe_plan(plan)}"
        step = seconds_text(plan.predicted_step_seconds)
        return f"{found}: {on_what_is_left(plan, whole.plan, left)}, {step} by its prediction"

    def _resumed(self, workers: Workers) -> int:
        """Return the step to resume from: that of a snapshot of all workers, or on the disk."""
        held = None
        if self._in_memory:
            most = min(self._recorded, self._sound)
            held = in_memory.newest_state(workers, most, self._since)
            step = held.moment.step if held else 0
            if step < self._home.finished_steps:  # it is needed, if its files are whole
                self._reload()
            held = held if step >= self._home.finished_steps else None
        for line in self._home.damaged:
            _log.warning(line)
        self._home = home = replace(self._home, damaged=())
        self._held, finished = held, home.finished_steps if held is None else held.moment.step
        if held is None:
            self._anchor = finished, self._rolled_back.get(finished, home.next_batch)
        if finished:
            _log.info(resuming(home.id, home.checkpoints, finished, self._recorded, bool(held)))
        if self.restarts:
            self.run_log.resume(finished)
        self._recorded = finished
        return finished

    @contextmanager
    def _ray(self) -> Iterator[RaySession]:
        """Yield a Ray, started unless it is; after a failure of its workers it stays for others."""
        started, self._session = self._session or self._start(), None
        self._standbys.disarm()
        with ExitStack() as stack:
            session = stack.enter_context(started)
            try:
                yield session
            except (WorkerError, HungError, DivergedError):
                if self._standbys.armed and self._renews(session):
                    with suppress(ClusterError):  # on one of the machines, which may be lost
                        session.end_workers()
                        self._session = session
                        stack.pop_all()
                raise

    def _renews(self, session: RaySession) -> bool:
        """Return whether to stay with a Ray; a new one looks for the hosts that are missing."""
        return session.renews and session.pool.hosts == self._all.plan.cluster["hosts"]

    def _begin_standbys(self, session: RaySession, places: list[Any], about: Any) -> None:
        """Have one more worker a host stand by; users' code may ask for ranks, so it waits."""
        with suppress(ClusterError):  # the restart meets it again
            for worker in session.begin(TrainWorker, ahead=_STANDBYS):
                if not self._config.is_users:
                    worker.submit("stand_by", self.plan.to_dict(), places[worker.host], *about)

    def _start_workers(self, session: RaySession, advance: Advance) -> Workers:
        """Start and connect the workers."""
        handles = session.spawn(TrainWorker, advance=advance)

        def check() -> None:
            session.check()
            self._stop.check()

        cluster, reduction = machines_of(self._config.cluster), self.plan.reduction
        transport = getattr(cluster, "transport", "auto")
        servers = session.serve(reduction.servers, reduction.workers)
        workers = Workers(handles, self.plan, check, cluster.answer_timeout, transport, servers)
        workers.connect(advance)
        return workers

    def _compare_hosts(self, workers: Workers, missing: Sequence[str] = ()) -> None:
        """Log a warning for each host that falls short of the others, and how to do without them.

        Raises:
            ConfigError: versions differ between the hosts.
        """
        reports = workers.submit("measure_host", str(self._home.path)).each()
        nodes = self._rendezvous.allocation.nodes if self._rendezvous else ()
        names = [name for name in nodes if name not in missing][: len(reports)]
        names = names or [handle.name for handle in workers.handles]
        hosts = [
            replace(report, name=name, clock=clock.offset / 1e9)
            for report, name, clock in zip(reports, names, workers.clocks(), strict=True)
        ]
        if problems := "; ".join(differing_versions(hosts)):
            raise ConfigError(f"The hosts differ: {problems}", "Give them the same environment.")
        short = list(shortages(hosts))
        if not short and self._config.task == "preflight":
            _log.info(f"nothing was found that sets these hosts apart: {', '.join(names)}")
        for name, line in short:
            _log.warning(f"{name}: {line}")
        if short and (slurm := getattr(self._config.cluster, "slurm", None)):
            left_out = dict.fromkeys([*filter(None, [slurm.exclude]), *(name for name, _ in short)])
            setting = to_type(("cluster.slurm.exclude", ",".join(left_out)))
            _log.warning(f"to do without: {setting}")

    def _start(self) -> RaySession:
        pool, cluster = self._all.pool, machines_of(self._config.cluster)
        assert pool is not None, "nothing to train on"
        wait, check = cluster.host_wait, self._stop.check
        there = self._there if wait and self.restarts else None
        limit = StartLimit(cluster.start_timeout, check=check, hosts=there, host_seconds=wait)
        return kind_of(cluster).start(pool, self._home.logs, limit, self._rendezvous)

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
        self._follow(chosen)
        self._all = self._ready = replace(self._ready, plan=chosen)
        workers.plan, self._tries = self.plan, None
        return True

    def _train_on(self, workers: Workers, finished: int) -> None:
        """Train by the plan, save, and close the workers."""
        with status(self._console, "reading the first batch", Phase.READING) as advance:
            left_out = sorted(self._left_out.batches)
            passed = self._next_batch(finished) - finished
            if passed or left_out or self._home.taken:
                about = passed, dict(self._home.taken), left_out
                workers.submit("pass_over", finished, *about).result(advance)
            workers.submit("first_batch", finished + 1).result(advance)
        if dry_steps := self._config.train.dry_steps:
            with status(self._console, "warming up", Phase.WARMING_UP):
                for _ in range(dry_steps):
                    workers.submit("dry_step", finished + 1).result()
        self.run_log.begin(workers.clocks())
        self.run_log.show(finished)
        snapshots = self._snapshots(workers, finished)
        self._in_memory, self._sound = snapshots is not None, self._config.train.steps
        settings = replace(self._config.train, eval_batches=self._ready.eval_batches)
        with self._stop.heeded(self._say, _SAVING, until="done"):
            save, log = self._saving(workers), self.run_log.step_log
            try:
                train(settings, workers, log, self._stop, finished, save, snapshots)
            except (DivergedError, ReplicaError):
                with suppress(SaveError):
                    save.finish(final=False)  # the save of an earlier step
                raise
            with suppress(WorkerError, ClusterError):  # all is done and saved
                workers.submit("close").result()

    def _set_up(self, workers: Workers, built: Answers, finished: int) -> None:
        """Compile the plan, and create the state or read it from the checkpoint."""
        begun = workers.submit("begin_setup", self.plan.to_dict())
        with self._interruptible():  # may wait for the network, while workers compile
            self.run_log.open(finished)
            hosts, on_fewer = self.plan.cluster["hosts"], self._all.on_fewer
            waits = machines_of(self._config.cluster).host_wait
            if not self.restarts and hosts > 1 and waits and on_fewer:
                with held_back(), status(self._console, "planning for a host less"):
                    line = loss_of_a_host(self.plan, on_fewer)
                _log.info(line)
        with status(self._console, "compiling", Phase.COMPILING) as advance:
            built.result(advance)
            self.run_log.compile_seconds = compile_everywhere(workers, begun, advance)
            self._home.check()
            assert self._ready.pool is not None
            processes = workers.submit("process").each()
            infos = workers.infos(processes, self._ready.pool.devices_per_host)
            write_plan_alone(self._home, replace(self.plan, workers=tuple(infos)))
            if not finished:
                init_from = self._ready.init_from
                create_everywhere(workers, str(init_from) if init_from else None)
        if self._held is not None:
            in_memory.restore(workers, self._held)
        elif finished:
            with status(self._console, "reading the checkpoint", Phase.READING) as advance:
                folder = str(self._home.checkpoints.absolute())
                workers.submit("restore", folder, finished).result(advance)
        if finished and workers.submit("chose_anew").result():
            _log.warning(
                f"XLA chose kernels anew, as {self._home.path}/autotune/ has no choices for "
                "these programs, GPUs and version: the last bits may differ from the run so far"
            )

    def _snapshots(self, workers: Workers, finished: int) -> SnapshotCadence | None:
        """Have the workers keep snapshots, if there is room; return when to take them."""
        if self._config.train.snapshot == 0 or not machines_of(self._config.cluster).max_restarts:
            return None
        if not in_memory.keep(workers, checkpoint.Moment(finished, self.restarts)):
            return None
        if self._held is None:
            return SnapshotCadence(self._config.train.snapshot)
        workers.submit("snapshot", finished).result()  # until then, some hosts may not hold it
        return SnapshotCadence(self._config.train.snapshot, taken=finished)

    def _diagnose(self, error: Exception) -> Failure | None:
        train = self._config.train
        setting = train.spikes if isinstance(error, SpikeError) else train.non_finite
        rolls_back = setting == "rollback"
        found = failure_of(error, self.finished_steps, train.steps, self.plan, rolls_back)
        return found and replace(found, trained=self.finished_steps > self._recorded)

    def _prepare_restart(self, failure: Failure, restart: Restart) -> None:
        self.restarts = restart.number
        self._rendezvous = self._rendezvous and reopened(self._rendezvous)
        if failure.passes_over:
            self._in_memory, self._since = False, restart.number
        if failure.spiked:
            self._leave_out(failure)
        self._reload(not self._in_memory, f"{failure.report}\n")
        limit = machines_of(self._config.cluster).max_restarts
        finished = self._home.finished_steps
        self._recorded = self.recorded_steps
        if failure.passes_over:
            self._rolled_back = {finished: self._next_batch(failure.step)}
        text = restart_text(failure, restart, limit, finished, self._in_memory)
        complain(text)
        self.run_log.close(finished, text)

    def _reload(self, thorough: bool = True, report: str = "") -> None:
        """Look for the newest checkpoint again; of what failed, there may be a report.

        Raises:
            FailedError: there are some, and none is intact.
        """
        try:
            with self._interruptible():  # it reads checkpoints
                home = folder.reload(self._home, self._config, thorough)
        except (ConfigError, OSError) as error:  # not a wrong setting, as the run had begun
            raise FailedError(f"{report}The run is not restarted: {error}") from None
        self._home = replace(home, damaged=(*self._home.damaged, *home.damaged))

    def _leave_out(self, failure: Failure) -> None:
        """Pass over the batches that led to a spike, and drop the states that may have had them.

        Raises:
            FailedError: there is no state before them, or others have not helped.
        """
        before = failure.step - LAG
        batches = [self._next_batch(step) for step in range(before, failure.step)]
        ending = self._left_out.ending(failure.step)
        later = before > 0 and checkpoint.steps_in(self._home.checkpoints)
        if not ending and (later or self._home.forked_from):  # else it begins at step 0
            with self._interruptible():
                ending = fetch_older(self._config, self._home, before, self._console)
        if ending:
            raise FailedError(f"{failure.report}\nThe run is not restarted: {ending}.")
        self._left_out = self._left_out.after(failure.step, batches)
        self._anchor, self._sound = (before, batches[0]), before
        go_back(self._config, self._home, before)
        some = ", ".join(map(str, batches))
        _log.warning(f"step {failure.step}: passing over batches {some}, from step {before + 1} on")

    def _next_batch(self, finished: int) -> int:
        """Return the index of the batch that comes after so many steps."""
        step, start = self._anchor
        return batch_index(start, finished - step, self._left_out.batches)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """End at once on a signal: for work that may take long and needs no cleaning up."""
        with self._stop.heeded(self._say, until="now"):
            self._stop.check()
            yield

    def _saving(self, workers: Workers) -> Saving:
        data = fingerprint_dataset(self._config.dataset)
        taken, plan = dict(self._home.taken), self.plan.to_dict()

        def describe(step: int) -> dict[str, Any]:
            position = {"next_batch": self._next_batch(step), "fingerprint": data, "taken": taken}
            return folder.contents(self._config, plan, step, position)

        settings, log = self._config.train.checkpoint, self.run_log
        checkpoints, failures = self._home.checkpoints, log.failed_saves
        return Saving(workers, checkpoints, settings, describe, failures, log.sync, log.saved)


class Standbys(Callback):
    """Begins the workers of the next attempt, once training has lasted as long as the first start.

    A run that is shorter never pays for them. After as long again those of one more begin, for a
    failure before the first ones are replaced.

    Attributes:
        armed: whether an attempt has trained and may have them.
    """

    def __init__(self) -> None:
        self.armed = False
        self._wait = 0.0
        self._due: list[float] = []
        self._begin: Callable[[], None]

    def arm(self, seconds: float, begin: Callable[[], None]) -> None:
        """Call `begin` after the first step that ends after so many seconds, then once more.

        Args:
            seconds: what this start has taken. A restart is shorter than the first start, which
                counts: what begins soon would take a second restart's processors.
            begin: has one more worker a host stand by, unless enough do.
        """
        self.armed, self._begin, self._wait = True, begin, max(self._wait, seconds)
        self._due = [time.monotonic() + n * self._wait for n in range(1, _STANDBYS + 1)]

    def disarm(self) -> None:
        """Begin no more: no attempt trains."""
        self._due = []

    def on_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """See `Callback.on_step`."""
        if self._due and time.monotonic() >= self._due[0]:
            del self._due[0]
            self._begin()
