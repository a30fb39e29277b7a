"""The record of a run under way: trackers, performance, and the summary and pictures at its end."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from launcher.base import LAUNCH, Clock, to_type, write_whole
from launcher.cluster.slurm.allocation import Allocation
from launcher.cluster.slurm.commands import SCRIPT
from launcher.config.cluster import machines_of
from launcher.config.compose import redacted
from launcher.config.schema import Config
from launcher.driver.callback import Callbacks
from launcher.driver.folder.folder import RunFolder
from launcher.driver.record.accounting import Accounting, batch_tokens, expected_fields, faults_of
from launcher.driver.record.best import Best
from launcher.driver.record.slowness import Slowness
from launcher.driver.record.step_log import FINITE, Pace, StepLog, Timelines, warm_up
from launcher.plan import Plan, describe_plan, timeline
from launcher.report import Metrics, TrackedRun, Tracker
from launcher.report import breakdown as step_breakdown
from launcher.report.breakdown import StepBreakdown, breakdown_tables, in_summary, print_breakdown
from launcher.report.console import ConsoleTracker, line_printer
from launcher.report.jsonl import METRICS, JsonlTracker, read_metrics
from launcher.report.pages.plots import PlotProcess, plot_loss, plot_memory, plot_timeline
from launcher.report.pages.run_page import Reported, run_report
from launcher.report.pages.timeline import FILE, read_timeline
from launcher.report.plan_table import beside_measured, plan_tables, predicted_memory
from launcher.report.summary import (
    REPORT,
    Summary,
    measured,
    performance,
    print_summary,
    write_summary,
)
from launcher.report.text import seconds_text
from launcher.report.trackers.tracker import CompositeTracker, open_trackers, openers
from launcher.stop import ENDINGS

TIMELINE = Path("plots/timeline.png")
# Files of a run's folder that trackers record, by name.
ARTIFACTS = {
    "plan": "plan.json",
    "config": "config.yaml",
    "timeline": FILE,
    "accounting": step_breakdown.FILE,
    "report": REPORT,
    "profile": "profile",
}

_log = logging.getLogger(__name__)


def write_planned(
    home: RunFolder, config: Config, plan: Plan, plan_seconds: float, plots: PlotProcess
) -> Summary:
    """Write the result of planning alone: the timeline's plot and the summary, which it returns."""
    expected, path = timeline(plan), home.path / TIMELINE
    plots.draw(expected, path, home.id, plan.predicted_step_seconds)
    summary = Summary(
        home.id,
        "planned",
        **predicted(plan),
        plan_seconds=plan_seconds,
        predicted_cost=predicted_cost(config, plan),
        **expected_fields(config, faults_of(config, plan), plan.predicted_step_seconds),
    )
    write_summary(home.path, summary)
    write_report(home.path, summary, plan, redacted(config))
    plots.wait()
    return summary


def predicted_cost(config: Config, plan: Plan) -> float | None:
    """Return the predicted cost of the run's steps, None where no price is given."""
    price = config.cluster.price_per_device_hour
    hours = plan.predicted_step_seconds * config.train.steps / 3600
    return None if price is None else hours * plan.held_devices * price


def predicted(plan: Plan) -> dict[str, Any]:
    """Return the fields of a summary that follow from the plan alone."""
    return {
        "predicted_step_seconds": plan.predicted_step_seconds,
        "predicted_samples_per_second": plan.predicted_samples_per_second,
        "predicted_bubble_fraction": plan.predicted_bubble_fraction,
        "predicted_peak_memory_bytes": predicted_memory(plan),
        "num_parameters": plan.num_parameters,
    }


class RunLog:
    """Records a run's steps, attempt after attempt, and sums the run up.

    Every tracker is handed the same: the plan's tables, each logged step, the comparison with the
    predictions, the plots and the summary.

    Attributes:
        step_log: takes the steps' results from the loop.
        accounting: where the time goes.
        compile_seconds: compile time of the newest attempt, None before.
        failed_saves: a line for each checkpoint that could not be saved.
        best: follows its evaluations.
    """

    def __init__(
        self,
        home: RunFolder,
        config: Config,
        plan: Plan,
        plan_seconds: float,
        console: Console,
        allocation: Allocation | None,
    ) -> None:
        self._home, self._config, self._console = home, config, console
        self._plan, self._plan_seconds, self._allocation = plan, plan_seconds, allocation
        self._metrics: JsonlTracker | None = None
        self._registered: tuple[Tracker, ...] = ()
        self._shown: ConsoleTracker | None = None  # lives for an attempt, the others for the run
        self._warm_up: set[int] = set()  # steps, of all attempts
        self.compile_seconds: float | None = None
        self.failed_saves: list[str] = []
        self._restarts: list[str] = []
        self.accounting = Accounting(home, config, plan, plan_seconds)
        report = config.report
        steps, traced = report.timeline_steps or (), report.profiler_steps or ()
        self.best = Best(config.train, home.path)
        from launcher.driver.record.samples import Samples  # it reads checkpoints: not for planning

        samples = Samples(
            config,
            home.path,
            plan.num_parameters,
            line_printer(console),
            lambda *table: self._trackers.table(*table),
        )
        timelines = Timelines(home.path, steps, traced, self.accounting.record)
        by_pace = machines_of(config.cluster).step_timeout is None
        pace = Pace(self._warm_up, config.dataset.patience) if by_pace else None
        tell = home.status.tell if home.status else lambda **fields: None
        self._slowness = Slowness(plan, self._warm_up, tell)
        own = home.status, self.accounting.wall, self.best, timelines, samples, pace, self._slowness
        self._callbacks = Callbacks(*own)
        self.step_log = StepLog(
            self._log,
            config.train.log_every,
            self._performance(),
            skips=config.train.non_finite == "skip",
            callbacks=self._callbacks,
            spikes=config.train.spikes,
        )
        if home.status:
            known = {"forked_from": home.forked_from, "step": home.finished_steps}
            home.status.tell(plan=describe_plan(plan), **known)
        self.step_log.begin(home.finished_steps)

    def saved(self, step: int) -> None:
        """Call the callbacks for the complete checkpoint after `step` steps."""
        self._callbacks.call("on_save", step, self._home.checkpoints / str(step))

    def follow(self, plan: Plan) -> None:
        """Go on with another plan: the run has fewer hosts now, or more again."""
        self._plan = plan
        self.accounting.follow(plan)
        self._slowness.follow(plan)
        if pace := self._callbacks.of(Pace):
            pace.forget()
        if self._metrics:
            self._tell_plan()
        if self._home.status:
            self._home.status.tell(plan=describe_plan(plan))

    def _tell_plan(self) -> None:
        for name, table in plan_tables(self._plan).items():
            self._trackers.table(name, *table)

    def open(self, finished_steps: int) -> None:
        """Prepare for an attempt that begins after `finished_steps`; later steps are logged again.

        The trackers are opened by the first attempt and live as long as the run.

        Raises:
            OSError: the metrics cannot be written.
        """
        path, first_step = self._home.path, finished_steps + 1
        self._warm_up.update(warm_up(finished_steps, self._config.train.dry_steps))
        for step in self.step_log.timelines.all:
            self._warm_up.update((step, step + 1))  # beside it, what was recorded is read
        if self._metrics:
            self._trackers.rewind(first_step)
            return
        self._metrics = JsonlTracker(path / METRICS, first_step)
        # Nothing in `wandb` may be a secret, and its tracker obeys the values.
        config = redacted(self._config) | {"wandb": dataclasses.asdict(self._config.wandb)}
        run = TrackedRun(self._home.id, path, config, self._metrics.records())
        chosen = openers(self._config.report.trackers or ())
        self._registered = open_trackers(run, chosen)
        self._tell_plan()
        self._callbacks.add_hooks(self._config.hooks)
        self._callbacks.call("on_start", finished_steps, path)

    def begin(self, clocks: Sequence[Clock]) -> None:
        """Begin the steps of an attempt, whose workers have these clocks."""
        self.step_log.timelines.begin(clocks)
        self._slowness.begin(clocks)

    @property
    def _trackers(self) -> CompositeTracker:
        return CompositeTracker(
            tuple(filter(None, (self._metrics, self._shown, *self._registered)))
        )

    def show(self, finished_steps: int) -> None:
        """Show the steps of the attempt on the console from now on."""
        self.accounting.started(self.compile_seconds)
        steps, faults = self._config.train.steps, self.accounting.wall.faults
        left = (steps - finished_steps) * self._plan.predicted_step_seconds
        saves = self._config.train.checkpoint
        if saves.every_minutes is None and left > faults.save_interval and not self._restarts:
            _log.info(
                f"a checkpoint about every {seconds_text(faults.save_interval)}, the newest "
                f"{saves.keep} kept: a fault is expected every "
                f"{faults.between_seconds / 3600:,.4g} h (cluster.hours_between_faults)"
            )
        self._shown = ConsoleTracker(self._console, steps, finished_steps + 1)

    def close(self, finished_steps: int, why: str) -> None:
        """End an attempt that failed; `resume` says where the next one begins.

        Args:
            finished_steps: the step that the checkpoint holds.
            why: what failed, and what follows, for the trackers' alert.
        """
        self._restarts.append(why)
        self._trackers.alert(f"{self._home.id}: restart", why)
        self.step_log.begin(finished_steps)
        self.accounting.wall.lap("redone")
        if self._home.status:
            self._home.status.restart(finished_steps)
        if self._shown:
            self._shown.finish({})
        self._shown = None

    def resume(self, finished_steps: int) -> None:
        """Return to the state after `finished_steps`, after an attempt that failed."""
        self.step_log.begin(finished_steps)
        self._callbacks.call("on_restart", finished_steps, self._restarts[-1])

    def sync(self) -> None:
        """Wait until the metrics are on the disk: no checkpoint may be newer than they are.

        Raises:
            LostFolderError: the run's folder is gone.
        """
        self._home.check()
        if self._metrics:
            self._metrics.sync()
        self.accounting.write(self.step_log.finished_steps)

    def _log(self, step: int, metrics: Metrics) -> None:
        self._home.check()
        if tokens := batch_tokens(self._config):
            home, size = self._home, self._config.train.global_batch_size
            batches = step - home.finished_steps + home.next_batch
            rows = sum(home.taken.values()) + batches * size
            metrics = {**metrics, "perf/tokens": rows * tokens // size}
        self._trackers.log(step, metrics)
        for key in FINITE:
            if not math.isfinite(metrics.get(key) or 0.0):
                title = f"{self._home.id}: {key} is not finite at step {step}"
                self._trackers.alert(title, f"train.non_finite={self._config.train.non_finite}")
                break

    def _performance(self) -> Callable[[float], Metrics]:
        samples, tokens = self._config.train.global_batch_size, batch_tokens(self._config)
        return lambda seconds: performance(seconds, self._plan, samples, tokens)

    def sum_up(self, reason: str, restarts: int, path: Path) -> None:
        """Finish the trackers, write the plots and the summary, and print it.

        Args:
            reason: the run's `exit_reason`.
            restarts: number of restarts by this process.
            path: the run's folder, which may have been moved.
        """
        if self._home.status:  # first, as trackers may take long to finish
            self._home.status.on_end(self.step_log.finished_steps, reason)
        with ExitStack() as stack:  # each of these also where one before it fails
            stack.callback(self._callbacks.call, "on_end", self.step_log.finished_steps, reason)
            metrics = path / METRICS
            if self._metrics:
                self._metrics.move(metrics)
            records = self._metrics.records() if self._metrics else read_metrics(metrics)
            summary, breakdown = self._summary(reason, restarts, records, path)
            resume_command = self._resume_command(reason)
            stack.callback(print_summary, self._console, path, summary, resume_command)
            stack.callback(print_breakdown, self._console, breakdown)
            stack.callback(self._trackers.finish, summary.to_dict())
            write_summary(path, summary)
            settings = redacted(self._config)
            about = self._plan, settings, records, breakdown, self._restarts
            write_report(path, summary, *about)
            pictures = draw_pictures(path, self._plan, records, summary.peak_memory_bytes)
            last = records[-1] if records else {}
            compared = beside_measured(self._plan, summary, last)
            self._trackers.table("plan/beside_measured", *compared)
            for name, table in breakdown_tables(breakdown).items():
                self._trackers.table(name, *table)
            for name, picture in pictures.items():
                self._trackers.image(name, picture)
            for name, file in ARTIFACTS.items():
                if (path / file).exists():
                    self._trackers.artifact(name, path / file)

    def _summary(
        self, reason: str, restarts: int, records: list[dict[str, Any]], path: Path
    ) -> tuple[Summary, StepBreakdown]:
        before = self._home.finished_steps
        plan, started = self._plan, psutil.Process().create_time()
        first_step_at = self.step_log.first_step_at
        allocation = self._allocation
        found = measured(records, self._performance(), before, self._warm_up)
        accounting = self.accounting.finish(path, self.step_log.finished_steps, found)
        step_seconds = found["step_seconds_median"] or plan.predicted_step_seconds
        faults = self.accounting.wall.faults
        if first_step_at is not None:
            faults = replace(faults, restart_seconds=first_step_at - started)
        summary = Summary(
            run_id=self._home.id,
            exit_reason=reason,
            restarts=(allocation.restarts if allocation else 0) + restarts,
            failed_saves=len(self.failed_saves),
            save_error=self.failed_saves[-1] if self.failed_saves else None,
            forked_from=self._home.forked_from,
            slow=self._slowness.worst,
            job_id=allocation.job_id if allocation else None,
            nodes=allocation.nodes if allocation else (),
            **found,
            **in_summary(accounting),
            **predicted(plan),
            predicted_cost=predicted_cost(self._config, plan),
            **expected_fields(self._config, faults, step_seconds),
            plan_seconds=self._plan_seconds,
            compile_seconds=self.compile_seconds,
            time_to_first_step_seconds=first_step_at and first_step_at - started,
            total_seconds=time.time() - started,
        )
        fields = self._trackers.summary_fields()
        known = {k: v for k, v in fields.items() if k in vars(summary)}
        return replace(summary, **known), accounting

    def _resume_command(self, reason: str) -> str | None:
        if not reason.startswith(tuple(word for _, word in ENDINGS.values())):
            return None
        if self._allocation is not None:
            script = self._home.path / SCRIPT
            return to_type("sbatch", str(script)) if script.exists() else None
        program = Path(sys.argv[0]).name
        command = [program] if program == "launcher" else LAUNCH
        begins = re.compile(r"\+*run\.(id|resume)=")
        settings = [word for word in sys.argv[1:] if not begins.match(word)]
        return to_type(*command, *settings, ("run.id", self._home.id))


def draw_timeline(plan: Plan, folder: Path, run_id: str) -> Path:
    """Draw the plan's predicted step into the run's folder; return the plot's path.

    Below it is the recorded step, the last one, if there is one.
    """
    path, recorded = folder / TIMELINE, read_timeline(folder / FILE)
    return plot_timeline(
        timeline(plan),
        path,
        run_id,
        plan.predicted_step_seconds,
        {step: recorded.spans(step) for step in recorded.steps},
    )


def draw_pictures(
    folder: Path, plan: Plan, records: Sequence[dict[str, Any]], peak: int | None
) -> dict[str, Path]:
    """Draw a run's pictures into its folder; return the paths by name of those that are drawn.

    A picture that cannot be written, for instance on a full disk, costs a warning.

    Args:
        folder: the run's folder.
        plan: its plan.
        records: its logged steps.
        peak: the measured peak of memory in bytes, None where it is unknown.
    """
    run_id, plots = folder.name, folder / "plots"
    drawn = {
        "timeline": functools.partial(draw_timeline, plan, folder, run_id),
        "memory": functools.partial(plot_memory, plan, peak, plots / "memory.png", run_id),
    }
    if records:
        drawn["loss"] = functools.partial(plot_loss, records, plots / "loss.png", run_id)
    pictures = {}
    for name, draw in drawn.items():
        try:
            pictures[f"plots/{name}"] = draw()
        except OSError as error:
            _log.warning(f"plots/{name}.png cannot be written: {error.strerror}")
    return pictures


def write_report(
    folder: Path,
    summary: Summary,
    plan: Plan,
    config: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]] = (),
    accounting: StepBreakdown | None = None,
    restarts: Sequence[str] = (),
) -> None:
    """Write `report.html` of a run; an error is a warning, and ends no run.

    Args:
        folder: the run's folder, with its recorded steps.
        summary: its summary.
        plan: its plan.
        config: its settings, without secrets.
        records: its logged steps.
        accounting: the breakdown of its time, None where that is not known.
        restarts: the message of each restart.
    """
    try:
        recorded = read_timeline(folder / FILE)
        steps = {step: recorded.spans(step) for step in recorded.steps}
        found = Reported(
            summary, plan, timeline(plan), config, records, steps, accounting, restarts
        )
        write_whole(folder / REPORT, run_report(found).encode())
    except Exception as error:
        _log.warning(f"{REPORT} cannot be written: {error}")
