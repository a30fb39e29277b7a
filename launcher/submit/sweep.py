"""Start a sweep (`-m`): a check of all points, jobs, or runs on this machine.

On this machine each point is run in a launcher process and folder of its own.

Each run has a process, because JAX, Ray and the GPUs' memory belong to a process for its life. The
runs share the user's compilation cache; each starts a Ray of its own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from launcher.base import answer, complain, end_with_parent, setting_word, write_whole
from launcher.cluster.devices import find_gpus, local_pool
from launcher.cluster.kinds import kind_of
from launcher.config.compose import Asked, Point, load_points, to_yaml
from launcher.config.errors import ConfigError
from launcher.config.hub import pins
from launcher.config.schema import Config
from launcher.config.search import Space
from launcher.config.sections import TASKS
from launcher.config.sweep import MakePoint, run_sweeper
from launcher.driver.folder.make_folder import private_files
from launcher.driver.planning import check
from launcher.recipes import InputError
from launcher.report.console import make_console
from launcher.report.sweep import (
    Row,
    is_done,
    objective_of,
    print_comparison,
    report_sweep,
    result_of,
    write_results,
)
from launcher.stop import Stop
from launcher.submit.points import (
    DONE,
    FAILED,
    RUNNING,
    PointNote,
    Points,
    make_sweep,
    members,
    mirror_of,
    open_points,
    place_sweep,
    settings_digest,
)

_POLL_SECONDS = 0.05
_WITHOUT_DEVICES = ("plan", "check")  # tasks

_Slot = Mapping[str, str]  # environment variables that show a run its devices


class StoppedError(Exception):
    """A signal stopped the sweep."""


def run_sweep(arguments: Sequence[str], config_dirs: Sequence[str], stop: Stop) -> int:
    """Run the sweep of a command line and return the exit code.

    Args:
        arguments: settings and options, swept ones among them, and those of Hydra's sweeper.
        config_dirs: the values of `--config-dir`.
        stop: ends a submission, and the runs in progress.

    Raises:
        ConfigError: a setting is wrong.
        KeyboardInterrupt: a signal ended a submission; `stop` has the exit code.
    """
    with ExitStack() as stack:
        one = RunningSweep(config_dirs, stop, stack)
        try:
            return run_sweeper(arguments, config_dirs, one.run, partial(one.search, arguments))
        except StoppedError:
            return one.close()


class RunningSweep:
    """Runs points, all of a list or those that a search asks for, in the folder of their sweep.

    A run that fails does not stop the others. A signal stops the runs in progress, which save their
    state, and the sweep with them.

    Args:
        config_dirs: the values of `--config-dir`.
        stop: ends a submission, and the runs in progress.
        stack: takes what the sweep holds open.
    """

    _points: Points
    _folder: Path  # `<multirun>/<sweep id>`

    def __init__(self, config_dirs: Sequence[str], stop: Stop, stack: ExitStack) -> None:
        self._dirs, self._stop, self._stack = config_dirs, stop, stack
        self._id, self._objective = "", ""
        self._failed: set[int] = set()

    def run(self, asked: Sequence[Asked]) -> int:
        """Check, submit or run a list of points; return the exit code.

        Raises:
            ConfigError: a setting is wrong, there are too few devices for the runs at a time, or a
                point has run with other settings.
            StoppedError: a signal came.
        """
        points, wrong = load_points(asked, self._dirs)
        if _is_check(points):
            return _check_sweep(points, wrong)
        if wrong:
            _raise_last(wrong)
        if (submission := _submission(points)) is not None:
            with self._stop.interruptible():
                code: int = submission.submit_sweep(points, self._stop)
                return code
        self._open(points)
        self._run_points(asked, points, {}, len(asked))
        return self.close()

    def search(self, arguments: Sequence[str], space: Space, make_point: MakePoint) -> int:
        """Search a space by Optuna, here or in jobs; return the exit code.

        Args:
            arguments: the command line.
            space: the space.
            make_point: makes its points.

        Raises:
            ConfigError, StoppedError: as of `run`.
        """
        from launcher.submit import study, trials

        points, wrong = load_points([make_point(words) for words in space.ends()], self._dirs)
        if _is_check(points):
            return _check_sweep(points, wrong)
        if not points:
            _raise_last(wrong)
        space = space.settled(points[0].config)
        if _submission(points) is not None:
            for point in points:
                _check_objective(point.config)
            return trials.Jobs(space, make_point, points, arguments, self._dirs).run(self._stop)
        self._open(points)
        settings = f"{settings_digest(points[0].config)} {self._objective}"
        journal = study.Study(self._folder, space, settings)
        study.run_study(journal, make_point, self._run_batch)
        if journal.is_given_up:
            complain("no further trial: more have failed than hydra.sweeper.max_failure_rate")
        if best := journal.best():
            write_whole(self._folder / "optimization_results.yaml", to_yaml(best))
        return self.close()

    def _run_batch(self, asked: Sequence[Asked], total: int) -> list[float | None]:
        """Run some of `total` points; return their objectives, None for those that failed."""
        try:
            points, wrong = load_points(asked, self._dirs)
        except ConfigError as error:  # all of them, in the same way
            points, wrong = [], {one.label: error for one in asked}
        return self._run_points(asked, points, wrong, total)

    def _run_points(
        self,
        asked: Sequence[Asked],
        points: Sequence[Point],
        wrong: Mapping[str, ConfigError],
        total: int,
    ) -> list[float | None]:
        """Run points, but for those that are done, and note which have failed."""
        by_label = {point.label: point for point in points}
        claimed = []
        for one in asked:
            point = by_label.get(one.label)
            settings = settings_digest(point.config) if point else ""
            claimed.append(self._points.claim(one.swept, settings, self._id))
            if point is None:
                complain(f"{one.label}: {wrong[one.label]}")
                self._points.note(replace(claimed[-1], state=FAILED))
        todo = [
            (noted, by_label[noted.label])
            for noted in claimed
            if noted.label in by_label
            and noted.state == RUNNING
            and noted.same_as is None
            and not self._found_done(noted)
        ]
        if todo:
            self._run(todo, total)
        values = [self._value(noted.number) for noted in claimed]
        self._write()
        return values

    def _open(self, points: Sequence[Point]) -> None:
        """Open the sweep that begins with these points, and heed signals from now on.

        Raises:
            ConfigError: the sweep is running, is to be fresh and is not, or cannot be made.
        """
        config = points[0].config
        for point in points:
            _check_objective(point.config)
        find_slots([point.config for point in points], os.environ)
        self._id, folder = place_sweep(points)
        make_sweep(folder, config.run.shared)
        self._stack.enter_context(private_files(config.run))
        self._points = self._stack.enter_context(open_points(folder))
        # It says nothing: the runs say that they heard a signal.
        self._stack.enter_context(self._stop.heeded(lambda text: None, until="asked"))
        self._objective, self._folder = objective_of(config), folder

    def _value(self, number: int) -> float | None:
        noted = self._points[number]
        if noted.same_as is not None:
            twin = self._points[noted.same_as]
            noted = replace(noted, state=twin.state, value=twin.value)
            self._points.note(noted)
        if noted.state == FAILED:
            self._failed.add(number)
        return noted.value

    def _found_done(self, noted: PointNote) -> bool:
        """Return whether a run has ended well that the sweep, cut off, has not noted."""
        if not is_done(self._folder / noted.run):
            return False
        value = result_of(self._folder / noted.run, self._objective)
        self._points.note(replace(noted, state=DONE, value=value))
        return True

    def _run(self, todo: Sequence[tuple[PointNote, Point]], total: int) -> None:
        """Run points to their ends, as many at a time as there are slots.

        After a signal no further run begins, and those in progress get it, too.
        """
        free = find_slots([point.config for _, point in todo], os.environ)
        logs = self._folder / "logs" if len(free) > 1 else None
        if logs:
            logs.mkdir(exist_ok=True)
        waiting, running = list(todo), dict[subprocess.Popen[bytes], tuple[PointNote, _Slot]]()
        passed_on = 0  # signals
        while running or (waiting and self._stop.requested is None):
            while waiting and free and self._stop.requested is None:
                (noted, point), slot = waiting.pop(0), free.pop(0)
                answer(f"[{noted.number + 1}/{max(total, noted.number + 1)}] {noted.label}")
                command = _command(point, self._dirs, self._folder, noted.run, self._id)
                child = start(command, slot, logs and logs / f"{noted.run}.txt")
                running[child] = noted, slot
            if self._stop.requested is not None and passed_on <= self._stop.repeats:
                is_ctrl_c = passed_on or self._stop.requested == signal.SIGINT
                for child in running:  # does nothing once the child has been waited for
                    child.send_signal(signal.SIGINT if is_ctrl_c else signal.SIGTERM)
                passed_on += 1
            time.sleep(_POLL_SECONDS)
            for child in [child for child in running if child.poll() is not None]:
                noted, slot = running.pop(child)
                free.append(slot)
                if not child.returncode or self._stop.requested is None:  # else it was stopped
                    self._note_end(noted, child.returncode, total, logs)
        if self._stop.requested is not None:
            raise StoppedError

    def _note_end(self, noted: PointNote, code: int, total: int, logs: Path | None) -> None:
        value = None if code else result_of(self._folder / noted.run, self._objective)
        self._points.note(replace(noted, state=FAILED if code else DONE, value=value))
        if code:
            where = f"; its output: {logs / noted.run}.txt" if logs else ""
            complain(f"{noted.label} ended with exit code {code}{where}")
        elif logs:
            shown = "" if value is None else f", {self._objective}={value:.6g}"
            answer(f"[{noted.number + 1}/{total}] {noted.label}: {DONE}{shown}")

    def _write(self) -> None:
        """Write `sweep.csv` and the picture."""
        rows = [Row(one.number, one.run, one.swept, one.state, one.value) for one in self._points]
        write_results(self._folder, rows, self._objective)

    def close(self) -> int:
        """Print a comparison, and return the exit code.

        0 if all runs ended well, 130 or 75 if a signal stopped the sweep, otherwise 1.
        """
        self._write()
        runs = [noted for noted in self._points if noted.same_as is None]
        existing = [self._folder / noted.run for noted in runs]
        existing = [path for path in existing if path.is_dir()]
        if existing:
            print_comparison(make_console(), existing)
            report_sweep(make_console(), self._folder, existing)
        if self._stop.requested is not None:
            return self._stop.ending[0]
        return int(bool(self._failed))


def start(
    command: Sequence[str], variables: Mapping[str, str], output: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one.

    It has a process group of its own, so that Ctrl-C in a terminal reaches it once, from here.

    Args:
        command: its command.
        variables: environment variables to add.
        output: the file for its output; None for the terminal.
    """
    with open(output, "ab") if output else nullcontext() as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT if file else None,
            env=os.environ | variables,
            process_group=0,
            preexec_fn=end_with_parent,
        )


def _check_objective(config: Config) -> None:
    """Check that the runs will have the result that `sweep.objective` names.

    Raises:
        ConfigError: they will not.
    """
    objective, planned = objective_of(config), config.task == "plan"
    if planned and not objective.startswith(("predicted_", "plan_")):
        raise ConfigError(
            f"sweep.objective={objective} is measured, but task=plan runs nothing",
            "Use predicted_step_seconds, or another task.",
        )
    if objective == "eval_loss" and not planned and not config.train.eval_every:
        raise ConfigError(
            "sweep.objective=eval_loss, but train.eval_every=0 never evaluates",
            "Set train.eval_every, or sweep.objective=final_loss.",
        )


def _command(
    point: Point, config_dirs: Sequence[str], folder: Path, run_id: str, sweep_id: str
) -> list[str]:
    command = [sys.executable, "-m", "launcher"]
    for config_dir in config_dirs:
        command += ["--config-dir", config_dir]
    of_sweep = re.compile(r"\+*sweep(\.jobs|\.objective)?=")
    command += [text for text in point.overrides if not of_sweep.match(text)]
    if TASKS[point.config.task] is not None:
        return command  # it makes no run
    command += [setting_word(key, text) for key, text in pins(point.config)]
    command += [setting_word("run.dir", str(folder)), setting_word("run.id", run_id)]
    if mirror := mirror_of(point.config, run_id):
        command += [setting_word("run.mirror", mirror)]
    wandb, is_used = point.config.wandb, "wandb" in (point.config.report.trackers or ())
    is_free = wandb.group is None and not os.environ.get("WANDB_RUN_GROUP")
    if is_used and is_free and wandb.mode != "disabled":
        command += [setting_word("wandb.group", sweep_id)]
    return command


def find_slots(configs: Sequence[Config], environ: Mapping[str, str]) -> list[_Slot]:
    """Return a slot for each of the `sweep.jobs` runs at a time, no two with the same GPU.

    Every run may use emulated devices. GPUs are divided: each run has as many as the largest asks
    for.

    Raises:
        ConfigError: there are not as many GPUs, or it is not known which each run would take.
    """
    jobs = max(config.sweep.jobs for config in configs)
    using = [config.cluster for config in configs if config.task not in _WITHOUT_DEVICES]
    exclusive = [cluster for cluster in using if not kind_of(cluster).is_emulated]
    if jobs == 1 or not exclusive:
        return [{} for _ in range(jobs)]
    for cluster in exclusive:
        if not kind_of(cluster).is_here:
            raise ConfigError(
                f"sweep.jobs={jobs}, but cluster={cluster.title} has one set of devices",
                "Leave sweep.jobs out: the runs then go one after another.",
            )
    gpus = find_gpus(environ)
    there = len(gpus.usable)
    if not there:
        return [{} for _ in range(jobs)]
    if any(cluster.gpus is None for cluster in exclusive):
        raise ConfigError(
            f"sweep.jobs={jobs}, but each run takes all {there} GPUs of this machine",
            f"Say how many each run is to have: cluster.gpus={max(there // jobs, 1)}.",
        )
    each = max(cluster.gpus or 0 for cluster in exclusive)
    if each * jobs > there:
        raise ConfigError(
            f"sweep.jobs={jobs} runs with cluster.gpus={each} need {each * jobs} GPUs, but this "
            f"machine has {there}",
            f"Set sweep.jobs={max(there // each, 1)} or less, or fewer cluster.gpus.",
        )
    pool = local_pool(replace(exclusive[0], gpus=there), gpus, environ.get("CUDA_VISIBLE_DEVICES"))
    ids = pool.gpu_ids
    return [{"CUDA_VISIBLE_DEVICES": ",".join(ids[each * n : each * (n + 1)])} for n in range(jobs)]


def _submission(points: Sequence[Point]) -> Any:
    """Return the module by which the points are submitted; None if they all run here."""
    found = (
        kind_of(point.config.cluster).submission()
        for point in points
        if point.config.task in ("train", "submit", "preflight", "check")
    )
    return next(filter(None, found), None)


def _is_check(points: Sequence[Point]) -> bool:
    return bool(points) and all(point.config.task == "check" for point in points)


def _check_sweep(points: Sequence[Point], wrong: Mapping[str, ConfigError]) -> int:
    """Check every run of a sweep as `task=check` does, and print all problems.

    Args:
        points: the runs whose settings could be composed.
        wrong: the errors of the others, by label.

    Raises:
        ConfigError, InputError, OSError: the last problem.
    """
    configs = members(points, *place_sweep(points))
    if (submission := _submission(points)) is not None:
        submission.check_jobs(configs)
    problems: dict[str, Exception] = {}
    lines: dict[str, None] = {}
    for point, config in zip(points, configs, strict=True):
        try:
            lines |= dict.fromkeys(check.check(config, os.environ))
        except (ConfigError, InputError, OSError) as error:
            problems[point.label] = error
    if wrong or problems:
        of_files = {label: one for label, one in problems.items() if isinstance(one, OSError)}
        _raise_last({**of_files, **wrong, **problems})
    return answer("\n".join([f"The settings of all {len(points)} runs are fine.", *lines]))


def _raise_last(wrong: Mapping[str, Exception]) -> NoReturn:
    """Print the errors of several points, by label, and raise the last one."""
    *before, (label, last) = wrong.items()
    for name, error in before:
        complain(f"{name}: {check.os_error_text(error) if isinstance(error, OSError) else error}")
    if isinstance(last, ConfigError):
        raise last.labelled(label) from None
    raise type(last)(f"{label}: {check.os_error_text(last) if isinstance(last, OSError) else last}")
