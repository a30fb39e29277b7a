"""One training run in its folder: files, workers, loop, and the account of it. `run` calls it."""

from __future__ import annotations

import functools
import json
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console

from launcher.cluster.session import start
from launcher.cluster.slurm_attempts import begin, finish
from launcher.cluster.slurm_meeting import Meeting
from launcher.cluster.slurm_script import SCRIPT
from launcher.config.compose import to_dict
from launcher.config.schema import Config
from launcher.plan import Plan, timeline
from launcher.report.console import ConsoleTracker, status
from launcher.report.files import write_whole
from launcher.report.jsonl import JsonlTracker, read_metrics
from launcher.report.metrics import measured, performance
from launcher.report.plan_record import beside_measured, plan_tables, predicted_memory
from launcher.report.plots import plot_loss, plot_timeline
from launcher.report.summary import Summary, print_summary, shown_path, write_summary
from launcher.report.tracker import CompositeTracker, Metrics, Tracker
from launcher.report.wandb_tracker import WandbTracker, open_wandb
from launcher.train.crew import Crew
from launcher.train.folder import RunFolder
from launcher.train.loop import profiled_step, train
from launcher.train.prepare import Prepared
from launcher.train.record import Recorder
from launcher.train.saving import Saving, contents
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
    WorkerError, DivergedError, SaveError, KeyboardInterrupt and OSError.
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
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise
    finally:
        try:
            if attempt is not None:
                step = max(home.finished_steps, job.recorder.finished_steps)
                finish(home.path, attempt, code, reason, step)
            job.sum_up(reason)
        except OSError:  # on a full disk, what ended the run is what has to be told
            if code == 0:
                raise


def write_plan(home: RunFolder, config: Config, plan: Plan) -> None:
    """Write what the run is to be: `config.yaml`, resolved, and `plan.json`."""
    tree = to_dict(replace(config, run=replace(config.run, id=home.id)))
    # Whole or not at all: another task of a Slurm job may be reading them.
    write_whole(home.path / "config.yaml", yaml.safe_dump(tree, sort_keys=False))
    write_whole(home.path / "plan.json", json.dumps(plan.to_dict(), indent=2) + "\n")


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
        self._init_from = str(ready.init_from) if ready.init_from else None
        self._saves: Saving | None = None
        self._trackers: list[Tracker] = []
        self.recorder = Recorder(self._log, config.train.log_every, self._performance())

    def train(self, stop: StopSignals) -> None:
        """Bring the workers up, train, save, take them down."""
        finished, steps = self._home.finished_steps, self._config.train.steps
        for line in self._home.damaged:
            self._say(line)
        if finished:
            folder = self._home.checkpoints / str(finished)
            self._say(f"resuming run {self._home.id} at step {finished} from {shown_path(folder)}")
        with ExitStack() as stack:
            with status(self._console, "starting Ray and the workers"):
                session = stack.enter_context(start(self._pool, self._home.logs, self._meeting))
                crew = Crew(session.spawn(TrainWorker), self._plan)
                crew.join()
            setup = crew.submit("setup", to_dict(self._config), self._plan.to_dict())
            self._open_files()  # while the worker traces and compiles
            with status(self._console, "compiling"):
                self._compile_seconds = setup.result()
                if finished:
                    crew.submit("restore", self._checkpoints, finished).result()
                else:
                    crew.submit("create", self._init_from).result()
            self._trackers.append(ConsoleTracker(self._console, steps, finished + 1))
            with stop.noted():
                train(self._config.train, crew, self.recorder, stop, finished, self._saving(crew))
                crew.submit("close").result()

    def sum_up(self, reason: str) -> None:
        """Finish the recording; write and print what the run came to."""
        metrics = self._home.path / "metrics.jsonl"
        records = read_metrics(metrics)
        summary = self._summary(reason, records)
        with ExitStack() as stack:  # each of these also where one before it fails
            resume_command = self._resume_command(reason)
            stack.callback(print_summary, self._console, self._home.path, summary, resume_command)
            stack.callback(CompositeTracker(tuple(self._trackers)).finish, summary.to_dict())
            write_summary(self._home.path, summary)
            plots = self._home.path / "plots"
            pictures = [plot_timeline(timeline(self._plan), plots / "timeline.png", self._home.id)]
            if records:
                pictures.append(plot_loss(records, plots / "loss.png", self._home.id))
            if self._wandb:
                last = records[-1] if records else {}
                compared = beside_measured(self._plan, summary, last)
                self._wandb.tables({"plan/beside_measured": compared})
                self._wandb.pictures(pictures)

    @property
    def _checkpoints(self) -> str:
        return str(self._home.checkpoints.absolute())

    def _open_files(self) -> None:
        path, config = self._home.path, self._config
        self._trackers.append(
            JsonlTracker(path / "metrics.jsonl", self._home.finished_steps + 1, self._say)
        )
        self._wandb = open_wandb(
            config.wandb,
            run_id=self._home.id,
            config=to_dict(config),
            run_dir=path,
            warn=functools.partial(self._console.print, soft_wrap=True),
        )
        if self._wandb:
            self._wandb.tables(plan_tables(self._plan))
            self._trackers.append(self._wandb)

    def _log(self, metrics: Metrics) -> None:
        for tracker in self._trackers:
            tracker.log(metrics)

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

    def _saving(self, crew: Crew) -> Saving:
        self._saves = Saving(
            crew,
            self._home.checkpoints,
            self._config.train.checkpoint,
            functools.partial(contents, self._config, self._plan),
            self._say,
        )
        return self._saves

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _summary(self, reason: str, records: list[dict[str, Any]]) -> Summary:
        # The step that was profiled ran task by task: its own time says nothing of the others.
        profiled = profiled_step(self._config.train.steps, self._home.finished_steps)
        if len(records) > 1:
            records = [r | dict.fromkeys(_RATES) if r["step"] == profiled else r for r in records]
        plan, started = self._plan, psutil.Process().create_time()
        first_step_at = self.recorder.first_step_at
        allocation = self._meeting and self._meeting.allocation
        failures = self._saves.failures if self._saves else []
        return Summary(
            run_id=self._home.id,
            exit_reason=reason,
            restarts=allocation.restarts if allocation else 0,
            failed_saves=len(failures),
            save_error=failures[-1] if failures else None,
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
        if reason not in {word for _, word in ENDINGS.values()}:
            return None
        if self._meeting is not None:
            script = self._home.path / SCRIPT
            return shlex.join(["sbatch", str(script)]) if script.exists() else None
        program = Path(sys.argv[0]).name
        command = [program] if program == "launcher" else ["python", "-m", "launcher"]
        settings = [word for word in sys.argv[1:] if not word.startswith("run.id=")]
        return shlex.join([*command, *settings, f"run.id={self._home.id}"])
