"""One training run in its folder: files, workers, loop, and the account of it. `run` calls it."""

from __future__ import annotations

import functools
import json
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console

from launcher.cluster.errors import ClusterError, WorkerError
from launcher.cluster.session import start
from launcher.cluster.slurm_attempts import begin, finish
from launcher.cluster.slurm_meeting import Meeting
from launcher.cluster.slurm_script import SCRIPT
from launcher.config.compose import to_dict
from launcher.config.schema import Config
from launcher.plan import Plan, timeline
from launcher.report.console import ConsoleTracker, complain, status
from launcher.report.jsonl import JsonlTracker, read_metrics
from launcher.report.metrics import measured, performance
from launcher.report.plan_record import beside_measured, plan_tables, predicted_memory
from launcher.report.plots import plot_loss, plot_timeline
from launcher.report.summary import Summary, print_summary, write_summary
from launcher.report.tracker import CompositeTracker, Metrics, Tracker
from launcher.report.wandb_tracker import WandbTracker, open_wandb
from launcher.train import checkpoint, folder
from launcher.train.crew import Answers, Crew
from launcher.train.folder import RunFolder
from launcher.train.incident import failure_of, restart_text
from launcher.train.loop import profiled_step, train
from launcher.train.prepare import Prepared
from launcher.train.record import DivergedError, Recorder
from launcher.train.recovery import Failure, Restart, recovering
from launcher.train.signals import ENDINGS, StopSignals
from launcher.train.worker import TrainWorker

_RATES = ("perf/step_seconds", "perf/samples_per_second", "perf/tokens_per_second", "perf/mfu")


def train_in(
    home: RunFolder,
    config: Config,
    ready: Prepared,
    console: Console,
    stop: StopSignals,
    meeting: Meeting | None = None,
) -> int:
    """Train in the folder `home`, from where its checkpoint left off; returns the exit code.

    In a Slurm job, where there is a `meeting`, it is an attempt with logs of its own. Whatever
    happens, no process stays behind and `summary.json` says how the run ended. Raises ClusterError,
    WorkerError, DivergedError, KeyboardInterrupt and OSError.
    """
    config = replace(config, run=replace(config.run, id=home.id))
    (home.path / "summary.json").unlink(missing_ok=True)
    attempt = None
    if meeting is not None:
        attempt = begin(home.path, meeting.allocation, _last_step(home))
        home = replace(home, attempt=attempt.number)
    home.logs.mkdir(exist_ok=True)
    write_plan(home, config, ready.plan)
    job = _Job(home, config, ready, console, meeting)
    code, reason = 1, "failed"
    try:
        job.train(stop)
        code, reason = 0, "done"
        if stop.requested and job.recorder.finished_steps < config.train.steps:
            code, reason = stop.ending
        return code
    except KeyboardInterrupt:
        code, reason = stop.ending
        if (saved := folder.again(home, config).finished_steps) < job.recorder.finished_steps:
            reason += f", not saved since step {saved}"
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise
    finally:
        if attempt is not None:
            step = max(home.finished_steps, job.recorder.finished_steps)
            finish(home.path, attempt, code, reason, step)
        job.sum_up(reason)


def write_plan(home: RunFolder, config: Config, plan: Plan) -> None:
    """Write what the run is to be: `config.yaml`, resolved, and `plan.json`."""
    tree = to_dict(replace(config, run=replace(config.run, id=home.id)))
    _write(home.path / "config.yaml", yaml.safe_dump(tree, sort_keys=False))
    _write(home.path / "plan.json", json.dumps(plan.to_dict(), indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    """Whole or not at all: another task of a Slurm job may be reading it."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def _last_step(home: RunFolder) -> int:
    """The newest step that is recorded; further than the newest checkpoint after a crash."""
    records = read_metrics(home.path / "metrics.jsonl")
    return max([home.finished_steps, *(record["step"] for record in records)])


def write_planned(home: RunFolder, plan: Plan, plan_seconds: float) -> None:
    """Write what was planned and not run: the timeline's picture and the summary."""
    plot_timeline(timeline(plan), home.path / "plots" / "timeline.png", home.id)
    summary = Summary(home.id, "planned", **predicted(plan), plan_seconds=plan_seconds)
    write_summary(home.path, summary)


def predicted(plan: Plan) -> dict[str, Any]:
    """The fields of a summary that the plan alone knows."""
    return {
        "predicted_step_seconds": plan.predicted_step_seconds,
        "predicted_samples_per_second": plan.predicted_samples_per_second,
        "predicted_bubble_fraction": plan.predicted_bubble_fraction,
        "predicted_peak_memory_bytes": predicted_memory(plan),
        "num_parameters": plan.num_parameters,
    }


class _Job:
    """A run under way: its workers, who records it, and what its summary will need."""

    def __init__(
        self,
        home: RunFolder,
        config: Config,
        ready: Prepared,
        console: Console,
        meeting: Meeting | None,
    ) -> None:
        self._home, self._config, self._console = home, config, console
        assert ready.pool is not None, "nothing to train on"
        self._meeting = meeting
        self._pool, self._plan, self._plan_seconds = ready.pool, ready.plan, ready.plan_seconds
        self._compile_seconds: float | None = None
        self._wandb: WandbTracker | None = None
        self._trackers: list[Tracker] = []  # of this attempt; the recording with wandb goes on
        self._newest_in_wandb = 0
        self._profiled: set[int] = set()
        self._restarts = 0
        # After a roll-back: to which step, and which batch is next.
        self._rolled_back: tuple[int, int] | None = None
        self._passed_over = 0  # how much further on in the data a batch is than its step's number
        self.recorder = Recorder(
            self._log,
            config.train.log_every,
            self._performance(),
            say=functools.partial(console.print, soft_wrap=True),
            skips=config.train.non_finite == "skip",
        )

    def train(self, stop: StopSignals) -> None:
        """Train to the end; after a failure that another start may mend, go on from the newest
        checkpoint. Raises what cannot be mended, or FailedError."""
        limit = self._config.cluster.max_restarts
        diagnose = functools.partial(self._diagnose, stop)
        recovering(functools.partial(self._attempt, stop), diagnose, self._begin_again, limit)

    def _attempt(self, stop: StopSignals) -> None:
        """Bring the workers up, train, save, take them down."""
        finished, steps = self._home.finished_steps, self._config.train.steps
        if finished >= steps:  # an attempt before failed when all was done
            return
        self._passed_over = self._stored_position() - finished
        with ExitStack() as stack:
            with status(self._console, "starting Ray and the workers"):
                session = stack.enter_context(start(self._pool, self._home.logs, self._meeting))
                workers, timeout = session.spawn(TrainWorker), self._config.cluster.step_timeout
                crew = Crew(workers, self._plan, session.check, timeout)
                crew.join()
            setup = crew.submit("setup", to_dict(self._config), self._plan.to_dict())
            self._open_files()  # while the worker traces and compiles
            with status(self._console, "compiling"):
                self._compile_seconds = setup.result()
                if finished:
                    crew.submit("restore", self._checkpoints, finished).result()
                else:
                    crew.submit("create").result()
                if self._passed_over:
                    crew.submit("pass_over", self._passed_over, finished).result()
            self._trackers.append(ConsoleTracker(self._console, steps, finished + 1))
            self._profiled.add(profiled_step(steps, finished))
            with stop.noted():
                save = functools.partial(self._save, crew)
                train(self._config.train, crew, self.recorder, stop, finished, save)
                with suppress(WorkerError, ClusterError):  # all is done and saved
                    crew.submit("close").result()

    def _diagnose(self, stop: StopSignals, error: Exception) -> Failure | None:
        if stop.requested or (self._meeting and self._pool.hosts > 1):
            return None  # Slurm brings a job of several nodes back, which end with their driver
        train, step = self._config.train, self.recorder.finished_steps
        rolls_back = train.non_finite == "rollback"
        failure = failure_of(error, step, train.steps, self._plan, rolls_back)
        if failure and isinstance(error, DivergedError):
            # The next batch is to be the one after that of the step that went wrong.
            behind = folder.again(self._home, self._config).finished_steps
            self._rolled_back = behind, error.step + self._passed_over
        return failure

    def _begin_again(self, failure: Failure, restart: Restart) -> None:
        CompositeTracker(tuple(self._trackers)).finish({})
        self._trackers.clear()
        self._restarts = restart.number
        self._home = folder.again(self._home, self._config)
        self.recorder.begin(self._home.finished_steps)
        limit, finished = self._config.cluster.max_restarts, self._home.finished_steps
        complain(restart_text(failure, restart, limit, finished))

    def _stored_position(self) -> int:
        """Which batch is next, from 0: after the newest checkpoint, or after a roll-back to it."""
        finished = self._home.finished_steps
        if self._rolled_back and self._rolled_back[0] == finished:
            return self._rolled_back[1]
        if not finished:
            return 0
        metadata = checkpoint.read_metadata(self._home.checkpoints, finished)
        return int(metadata["data"]["next_batch"])

    def sum_up(self, reason: str) -> None:
        """Finish the recording; write and print what the run came to."""
        metrics = self._home.path / "metrics.jsonl"
        records = read_metrics(metrics)
        summary = self._summary(reason, records)
        write_summary(self._home.path, summary)
        try:
            plots = self._home.path / "plots"
            pictures = [plot_timeline(timeline(self._plan), plots / "timeline.png", self._home.id)]
            if records:
                pictures.append(plot_loss(records, plots / "loss.png", self._home.id))
            if self._wandb:
                last = records[-1] if records else {}
                compared = beside_measured(self._plan, summary, last)
                self._wandb.tables({"plan/beside_measured": compared})
                self._wandb.pictures(pictures)
        finally:
            every = [*self._trackers, *([self._wandb] if self._wandb else [])]
            CompositeTracker(tuple(every)).finish(summary.to_dict())
        print_summary(self._console, self._home.path, summary, self._resume_command(reason))

    @property
    def _checkpoints(self) -> str:
        return str(self._home.checkpoints.absolute())

    def _open_files(self) -> None:
        path, config = self._home.path, self._config
        self._trackers.append(
            JsonlTracker(path / "metrics.jsonl", first_step=self._home.finished_steps + 1)
        )
        if self._wandb:
            return
        self._wandb = open_wandb(
            config.wandb,
            run_id=self._home.id,
            config=to_dict(config),
            run_dir=path,
            warn=functools.partial(self._console.print, soft_wrap=True),
        )
        if self._wandb:
            self._wandb.tables(plan_tables(self._plan))

    def _log(self, metrics: Metrics) -> None:
        for tracker in self._trackers:
            tracker.log(metrics)
        step = int(metrics["step"] or 0)
        if self._wandb and step > self._newest_in_wandb:  # which takes no step twice
            self._wandb.log(metrics)
            self._newest_in_wandb = step

    def _performance(self) -> Callable[[float], Metrics]:
        samples = self._config.train.global_batch_size
        length = getattr(self._config.model, "sequence_length", None)
        return functools.partial(
            performance,
            samples=samples,
            tokens=length and samples * length,
            flops=self._plan.flops_per_step,
            devices=self._plan.num_devices,
            peak_flops=self._plan.cluster["peak_flops"],
        )

    def _save(self, crew: Crew, step: int) -> Answers:
        metadata = {
            "config": to_dict(self._config),
            "plan": self._plan.to_dict(),
            "data": {"next_batch": step + self._passed_over},
        }
        return crew.submit("save", self._checkpoints, step, metadata)

    def _summary(self, reason: str, records: list[dict[str, Any]]) -> Summary:
        # The step that was profiled ran task by task: its own time says nothing of the others.
        if len(records) > 1:
            hidden = dict.fromkeys(_RATES)
            records = [r | hidden if r["step"] in self._profiled else r for r in records]
        plan, started = self._plan, psutil.Process().create_time()
        first_step_at = self.recorder.first_step_at
        allocation = self._meeting and self._meeting.allocation
        return Summary(
            run_id=self._home.id,
            exit_reason=reason,
            restarts=(allocation.restarts if allocation else 0) + self._restarts,
            job_id=allocation.job_id if allocation else None,
            nodes=allocation.nodes if allocation else (),
            **measured(records),
            **predicted(plan),
            plan_seconds=self._plan_seconds,
            compile_seconds=self._compile_seconds,
            time_to_first_step_seconds=first_step_at and first_step_at - started,
            total_seconds=time.time() - started,
            wandb_url=self._wandb.url if self._wandb else None,
            wandb_sync_command=self._wandb.sync_command if self._wandb else None,
        )

    def _resume_command(self, reason: str) -> str | None:
        if not reason.startswith(tuple(word for _, word in ENDINGS.values())):
            return None
        if self._meeting is not None:
            script = self._home.path / SCRIPT
            return shlex.join(["sbatch", str(script)]) if script.exists() else None
        program = Path(sys.argv[0]).name
        command = [program] if program == "launcher" else ["python", "-m", "launcher"]
        settings = [word for word in sys.argv[1:] if not word.startswith("run.id=")]
        return shlex.join([*command, *settings, f"run.id={self._home.id}"])
