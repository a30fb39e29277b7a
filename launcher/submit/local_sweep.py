"""Runs the points of a sweep, each in a launcher process and folder of its own.

There is a process for each run, because JAX, Ray and the GPUs' memory belong to a process for its
life. The compilation cache is the user's, so runs share it; each starts a Ray of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from launcher.base.files import make_private
from launcher.base.output import answer, complain
from launcher.config.compose import Point
from launcher.config.errors import ConfigError
from launcher.config.overrides import written
from launcher.config.schema import Config, Run
from launcher.config.sweeper import Batch, Outcome
from launcher.driver.folder.private_files import private_files
from launcher.report.console import make_console
from launcher.report.sweep import is_done, print_comparison, report_sweep
from launcher.report.sweep_results import Row, objective_of, result_of, write_results
from launcher.submit.placing import place_sweep
from launcher.submit.points import (
    DONE,
    FAILED,
    RUNNING,
    PointNote,
    Points,
    open_points,
    settings_digest,
)
from launcher.submit.processes import STOPS, PointProcess, SignalRelay
from launcher.submit.slots import find_slots


class StoppedError(Exception):
    """A signal stopped the sweep."""


class LocalSweep:
    """Runs the batches of points that a sweeper asks for in `<multirun>/<sweep id>`.

    A run that fails does not stop the others. A signal stops the runs in progress, which save their
    state, and the sweep with them.

    Attributes:
        folder: the sweep's folder.
    """

    def __init__(
        self, sweep_id: str, folder: Path, points: Points, relay: SignalRelay, dirs: Sequence[str]
    ) -> None:
        self.folder = folder
        self._id, self._points, self._relay, self._dirs = sweep_id, points, relay, dirs
        self._batches = 0
        self._objective = ""
        self._failed: set[int] = set()

    def run(
        self, batch: Batch, points: Sequence[Point], wrong: Mapping[str, ConfigError]
    ) -> list[Outcome]:
        """Run a batch of points; those that are done already are not run again.

        Args:
            batch: the points.
            points: those of them whose settings are right.
            wrong: the errors of the others, by label.

        Raises:
            StoppedError: a signal came.
            ConfigError: there are not devices for so many runs at a time, or a point has run with
                other settings.
        """
        by_label = {point.label: point for point in points}
        claimed = []
        for one in batch.points:
            point = by_label.get(one.label)
            settings = settings_digest(point.config) if point else ""
            claimed.append(self._points.claim(one.swept, settings, self._batches, self._id))
            if point is None:
                complain(f"{one.label}: {wrong[one.label]}")
                self._points.note(replace(claimed[-1], state=FAILED))
        self._batches += 1
        todo = [
            (noted, by_label[noted.label])
            for noted in claimed
            if noted.label in by_label
            and noted.state == RUNNING
            and noted.same_as is None
            and not self._found_done(noted)
        ]
        if todo:
            self._run(todo, batch.total)
        outcomes = [self._outcome(noted.number) for noted in claimed]
        self.write()
        return outcomes

    def _outcome(self, number: int) -> Outcome:
        noted = self._points[number]
        if noted.same_as is not None:
            twin = self._points[noted.same_as]
            noted = replace(noted, state=twin.state, value=twin.value)
            self._points.note(noted)
        if noted.state == FAILED:
            self._failed.add(number)
        problem = "" if noted.value is not None else f"{noted.label} has no objective"
        return Outcome(noted.value, problem)

    def _found_done(self, noted: PointNote) -> bool:
        """Return whether a run has ended well that the sweep, cut off, has not noted."""
        if not is_done(self.folder / noted.run):
            return False
        value = result_of(self.folder / noted.run, self._objective)
        self._points.note(replace(noted, state=DONE, value=value))
        return True

    def _run(self, todo: Sequence[tuple[PointNote, Point]], total: int) -> None:
        slots = find_slots([point.config for _, point in todo], os.environ)
        objective = objective_of(todo[0][1].config)
        side_by_side = len(slots) > 1
        logs = self.folder / "logs"
        if side_by_side:
            logs.mkdir(exist_ok=True)
        jobs = [
            PointProcess(
                _command(point, self._dirs, self.folder, noted.run, self._id),
                logs / f"{noted.run}.txt" if side_by_side else None,
            )
            for noted, point in todo
        ]

        def began(n: int) -> None:
            noted = todo[n][0]
            answer(f"[{noted.number + 1}/{max(total, noted.number + 1)}] {noted.label}")

        def ended(n: int, code: int) -> None:
            noted = todo[n][0]
            if self._relay.received is not None and code:
                return  # to go on with
            state = FAILED if code else DONE
            value = None if state == FAILED else result_of(self.folder / noted.run, objective)
            self._points.note(replace(noted, state=state, value=value))
            if state == FAILED:
                where = f"; its output: {jobs[n].output}" if side_by_side else ""
                complain(f"{noted.label} ended with exit code {code}{where}")
            elif side_by_side:
                shown = "" if value is None else f", {objective}={value:.6g}"
                answer(f"[{noted.number + 1}/{total}] {noted.label}: {state}{shown}")

        self._relay.run(jobs, slots, began, ended)
        if self._relay.received is not None:
            raise StoppedError

    def write(self) -> None:
        """Write `sweep.csv` and the picture."""
        write_results(self.folder, [_row(noted) for noted in self._points], self._objective)

    def close(self) -> int:
        """Print a comparison, and return the exit code.

        0 if all runs ended well, 130 or 75 if a signal stopped the sweep, otherwise 1.
        """
        self.write()
        runs = [noted for noted in self._points if noted.same_as is None]
        existing = [self.folder / noted.run for noted in runs]
        existing = [path for path in existing if path.is_dir()]
        if existing:
            print_comparison(make_console(), existing)
            report_sweep(make_console(), self.folder, existing)
        if self._relay.received is not None:
            return STOPS[self._relay.received][1]
        return int(bool(self._failed))


def _row(noted: PointNote) -> Row:
    return Row(noted.number, noted.run, noted.swept, noted.state, noted.value)


@contextmanager
def local_sweep(points: Sequence[Point], config_dirs: Sequence[str]) -> Iterator[LocalSweep]:
    """Open the sweep of these points, its first ones, and hear signals.

    Raises:
        ConfigError: the sweep is running, is to be fresh and is not, or cannot be made.
    """
    config = points[0].config
    for point in points:
        _check_objective(point.config)
    find_slots([point.config for point in points], os.environ)
    sweep_id, folder = place_sweep(points)
    _make(folder, config.run)
    with private_files(config.run), open_points(folder) as noted, SignalRelay() as relay:
        swept = LocalSweep(sweep_id, folder, noted, relay, config_dirs)
        swept._objective = objective_of(config)
        yield swept


def _make(folder: Path, run: Run) -> None:
    """Make the sweep's folder; only its user may read it, unless the runs are shared.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        if run.shared:
            folder.mkdir(parents=True, exist_ok=True)
        elif not folder.is_dir():
            make_private(folder)
    except OSError as error:
        raise ConfigError(
            f"The sweep's folder {folder} cannot be made: {error.strerror}",
            "Set run.dir to a folder that you may write.",
            ["run.dir"],
        ) from None


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
            ["sweep.objective"],
        )
    if objective == "eval_loss" and not planned and not config.train.eval_every:
        raise ConfigError(
            "sweep.objective=eval_loss, but train.eval_every=0 never evaluates",
            "Set train.eval_every, or sweep.objective=final_loss.",
            ["sweep.objective", "train.eval_every"],
        )


def _command(
    point: Point, config_dirs: Sequence[str], folder: Path, run_id: str, sweep_id: str
) -> list[str]:
    command = [sys.executable, "-m", "launcher"]
    for config_dir in config_dirs:
        command += ["--config-dir", config_dir]
    command += [text for text in point.overrides if not text.lstrip("+").startswith("sweep.")]
    command += [f"run.dir={written(str(folder))}", f"run.id={written(run_id)}"]
    if point.config.wandb.group is None and point.config.wandb.mode != "disabled":
        command += [f"wandb.group={written(sweep_id)}"]
    return command
