"""The trials of a sweep by Optuna as elements of a job array on Slurm.

The batch script repeats the command line of the sweep. In a job it means: ask for a trial when the
element starts, run it, and tell its result when it ends. Nothing waits for the elements. Each looks
after the others, too: a trial whose job is lost has failed, and is tried again.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from launcher.base import answer, complain, lines_to, write_whole
from launcher.cluster.slurm.allocation import PREEMPTED, Allocation, find_allocation
from launcher.cluster.slurm.commands import ENDED, SCRIPT, SlurmError, job_states
from launcher.config.cluster import slurm_cluster, slurm_of
from launcher.config.compose import Point, load_points
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.config.search import Space
from launcher.config.sweep import MakePoint
from launcher.driver.folder.make_folder import make_folder, private_files
from launcher.report.console import line_printer, make_console
from launcher.report.sweep import objective_of, result_of
from launcher.stop import Stop
from launcher.submit import job
from launcher.submit.points import (
    make_sweep,
    member,
    members,
    open_points,
    place_sweep,
    settings_digest,
)
from launcher.submit.study import Study

_POLL_SECONDS = 0.5


class Jobs:
    """A sweep by Optuna on Slurm: submitted, or one of its elements.

    Args:
        space: what is searched.
        make_point: makes the points of the space.
        points: some of them, whose settings are right.
        arguments: the command line of the sweep.
        config_dirs: the values of `--config-dir`.

    Raises:
        ConfigError: run.id or run.dir is swept.
    """

    def __init__(
        self,
        space: Space,
        make_point: MakePoint,
        points: Sequence[Point],
        arguments: Sequence[str],
        config_dirs: Sequence[str],
    ) -> None:
        self._space, self._make_point, self._points = space, make_point, points
        self._arguments, self._dirs = arguments, config_dirs
        self._config = job.as_run(points[0].config)
        self._id, self._folder = place_sweep(points)

    def run(self, stop: Stop) -> int:
        """Submit the sweep or, in a job of it, do this task's part; return the exit code.

        Raises:
            ConfigError: a setting is wrong.
            KeyboardInterrupt: a signal ended it; `stop` has the exit code.
        """
        allocation = find_allocation(os.environ)
        if allocation is None or "SLURM_ARRAY_TASK_ID" not in os.environ:
            with stop.interruptible():
                return self._submit(stop)
        with private_files(self._config.run):
            return self._element(allocation, int(os.environ["SLURM_ARRAY_TASK_ID"]), stop)

    # -- On the login node ------------------------------------------------------------------------

    def _submit(self, stop: Stop) -> int:
        limit = slurm_of(self._config.cluster).array or self._space.jobs
        configs = members(self._points, self._id, self._folder)
        job.check_jobs([_in_array(config, limit) for config in configs])
        if slurm_of(configs[0].cluster).dry_run:
            return answer(self._script(range(self._space.trials), limit), end="")
        job.check_site(configs)
        from launcher.driver.planning.prepare import prepare

        with lines_to(line_printer(make_console())):
            prepare(self._config, Console(quiet=True))  # so that no job waits for a wrong setting
        made = () if (is_old := self._folder.exists()) else (self._folder,)
        make_sweep(self._folder, self._config.run.shared)
        with private_files(self._config.run), open_points(self._folder):
            if is_old:
                self._check_idle()
            study = self._study()
            study.release()
            if not (places := study.open_places()):
                return answer(f"all {self._space.trials} trials of {self._folder} have ended")
            homes = {f"_{n}": make_folder(self._member(n)) for n in places}
            for home in homes.values():
                (home / "logs").mkdir(exist_ok=True)
            text, said = self._script(places, limit), "submitted job array {}".format
            job.hand_in(self._config, self._folder / SCRIPT, text, homes, said, made, stop)
        return job.say_where(self._folder)

    def _script(self, places: Sequence[int], limit: int) -> str:
        words = ["-m", *(f"--config-dir={each}" for each in self._dirs), *self._arguments]
        words += [f"run.id={self._id}"]
        output = job.output_file(self._folder.absolute() / f"{self._id}-%a", "%A_%a")
        whole = len(places) == places[-1] - places[0] + 1
        elements = f"{places[0]}-{places[-1]}" if whole else ",".join(map(str, places))
        quoted = list(map(shlex.quote, words))
        return job.script(self._config, self._id, output, quoted, f"{elements}%{limit}")

    def _check_idle(self) -> None:
        """Raise ConfigError if jobs of the sweep are live."""
        noted = (job.read_job(path.parent) for path in self._folder.glob(f"*/{job.JOB_FILE}"))
        states = job_states()
        for one in filter(None, noted):
            if states.get(one.job_id, "COMPLETED") not in ENDED:
                raise ConfigError(
                    f"run.id={self._id} is a sweep whose job {one.job_id} has not ended",
                    "Wait for it, end it with scancel, or choose another run.id.",
                )

    # -- In a job ---------------------------------------------------------------------------------

    def _element(self, allocation: Allocation, place: int, stop: Stop) -> int:
        from launcher.driver.slurm import note_exit_code, run_allocated, serve_node

        owner = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{place}"
        noted = self._folder / ".places" / "{}-{}".format(*allocation.key)
        if allocation.index:
            with stop.interruptible():
                found = _await_place(noted, slurm_of(self._config.cluster).start_timeout)
            return serve_node(self._member(int(found)), allocation, stop) if found else 0
        with stop.interruptible():
            study = self._study()
            self._look_after_others(study, owner)
            trial = study.take(place, owner)
            noted.parent.mkdir(exist_ok=True)
            write_whole(noted, "" if trial is None else str(trial.place))
        if trial is None:
            answer("no trial is left to run")
            return note_exit_code(0)
        answer(f"trial {trial.number}: {' '.join(trial.swept)}")
        home = self._folder / f"{self._id}-{trial.place}"
        if trial.place != place:
            job.note_job(home, owner, self._folder / SCRIPT)
        try:
            [point], _ = load_points([self._make_point(trial.swept)], self._dirs)
            config = member(job.as_run(point.config), self._id, self._folder, trial.place)
            code = run_allocated(config, allocation, stop)
        except ConfigError:
            study.tell(trial.number, None)
            raise
        if code == PREEMPTED:
            return code  # it comes back, or is looked after
        study.tell(trial.number, None if code else result_of(home, objective_of(config)))
        self._look_after_others(study, owner)
        if allocation.restarts < allocation.max_requeues and study.take(place, owner):
            answer("the trial of a lost job is tried again: this element comes back for it")
            code = PREEMPTED
        return note_exit_code(code)

    def _look_after_others(self, study: Study, owner: str) -> None:
        """Tell the results of trials whose jobs are lost."""
        running = {t: by for t, by in study.running().items() if by not in ("", owner)}
        if not running:
            return
        try:
            states = job_states(_give_up)
        except (SlurmError, FileNotFoundError):
            return  # another element will ask again
        for trial, by in running.items():
            state = states.get(by, "forgotten")
            if state in ENDED or state == "forgotten":
                complain(f"trial {trial.number} failed: its job {by} is {state}")
                study.tell_lost(trial.number, is_repeated=state != "CANCELLED")

    def _study(self) -> Study:
        settings = f"{settings_digest(self._config)} {objective_of(self._config)}"
        return Study(self._folder, self._space, settings)

    def _member(self, place: int) -> Config:
        return member(self._config, self._id, self._folder, place)


def _in_array(config: Config, limit: int) -> Config:
    cluster = slurm_cluster(config.cluster)
    return replace(config, cluster=replace(cluster, slurm=replace(cluster.slurm, array=limit)))


def _give_up(seconds: float) -> None:
    """Stand in for a pause before Slurm's controller is asked again."""
    raise SlurmError("Slurm's controller does not answer")


def _await_place(noted: Path, patience: float) -> str:
    """Return the place that task 0 of this start of the job took, "" for none."""
    deadline = time.monotonic() + patience
    while not noted.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return noted.read_text() if noted.exists() else ""
