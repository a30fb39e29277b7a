"""Run the points of a sweep on this machine, each in a launcher process and folder of its own.

Each run has a process, because JAX, Ray and the GPUs' memory belong to a process for its life. The
runs share the user's compilation cache; each starts a Ray of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType

from launcher.base import answer, complain, end_with_parent, make_private
from launcher.cluster.devices import find_gpus, local_pool
from launcher.cluster.kinds import kind_of
from launcher.config.compose import Point
from launcher.config.errors import ConfigError
from launcher.config.overrides import written
from launcher.config.schema import Config
from launcher.config.sections import Run
from launcher.config.sweep import Batch, Outcome
from launcher.driver.folder.private_files import private_files
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

_POLL_SECONDS = 0.05
_WITHOUT_DEVICES = ("plan", "check")  # tasks

# For each signal to the sweep: the signal that its runs get, and the sweep's exit code.
STOPS = {
    signal.SIGINT: (signal.SIGINT, 130),
    signal.SIGTERM: (signal.SIGTERM, 75),
    signal.SIGHUP: (signal.SIGTERM, 75),  # the terminal is gone
    signal.SIGUSR1: (signal.SIGTERM, 75),
    signal.SIGUSR2: (signal.SIGTERM, 75),
}

_Slot = Mapping[str, str]  # environment variables that show a run its devices


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
        self,
        sweep_id: str,
        folder: Path,
        objective: str,
        points: Points,
        relay: SignalRelay,
        dirs: Sequence[str],
    ) -> None:
        self.folder = folder
        self._id, self._points, self._relay, self._dirs = sweep_id, points, relay, dirs
        self._batches, self._objective = 0, objective
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
            ConfigError: there are too few devices for the runs at a time, or a point has run with
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
        """Run points to their ends, as many at a time as there are slots.

        After a signal no further run begins.
        """
        free = find_slots([point.config for _, point in todo], os.environ)
        logs = self.folder / "logs" if len(free) > 1 else None
        if logs:
            logs.mkdir(exist_ok=True)
        waiting, running = list(todo), dict[subprocess.Popen[bytes], tuple[PointNote, _Slot]]()
        while True:
            while waiting and free and self._relay.received is None:
                (noted, point), slot = waiting.pop(0), free.pop(0)
                answer(f"[{noted.number + 1}/{max(total, noted.number + 1)}] {noted.label}")
                command = _command(point, self._dirs, self.folder, noted.run, self._id)
                child = self._relay.start(command, slot, logs and logs / f"{noted.run}.txt")
                running[child] = noted, slot
            if not running:
                break
            time.sleep(_POLL_SECONDS)
            for child in [child for child in running if child.poll() is not None]:
                noted, slot = running.pop(child)
                free.append(slot)
                if not child.returncode or self._relay.received is None:  # else it was stopped
                    self._note_end(noted, child.returncode, total, logs)
        if self._relay.received is not None:
            raise StoppedError

    def _note_end(self, noted: PointNote, code: int, total: int, logs: Path | None) -> None:
        value = None if code else result_of(self.folder / noted.run, self._objective)
        self._points.note(replace(noted, state=FAILED if code else DONE, value=value))
        if code:
            where = f"; its output: {logs / noted.run}.txt" if logs else ""
            complain(f"{noted.label} ended with exit code {code}{where}")
        elif logs:
            shown = "" if value is None else f", {self._objective}={value:.6g}"
            answer(f"[{noted.number + 1}/{total}] {noted.label}: {DONE}{shown}")

    def write(self) -> None:
        """Write `sweep.csv` and the picture."""
        rows = [Row(one.number, one.run, one.swept, one.state, one.value) for one in self._points]
        write_results(self.folder, rows, self._objective)

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


class SignalRelay:
    """Starts processes and passes the signals of `STOPS` on to them.

    A process has a process group of its own, so that Ctrl-C in a terminal reaches it once, from
    here, and not twice.

    Attributes:
        received: the first signal that came, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SignalRelay:
        heeded = [s for s in STOPS if signal.getsignal(s) is not signal.SIG_IGN]  # as by nohup
        self._previous = {signum: signal.signal(signum, self._handle) for signum in heeded}
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def start(
        self, command: Sequence[str], variables: Mapping[str, str], output: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process.

        Args:
            command: its command.
            variables: environment variables to add.
            output: the file for its output; None for the terminal.
        """
        with open(output, "ab") if output else nullcontext() as file:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT if file else None,
                env=os.environ | variables,
                process_group=0,
                preexec_fn=end_with_parent,
            )
        self._started.append(child)
        if self.received is not None:  # it came while the process was being made
            child.send_signal(STOPS[self.received][0])
        return child

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        received = signal.Signals(signum)
        self.received = self.received or received
        for child in self._started:
            child.send_signal(STOPS[received][0])  # does nothing once the child has been waited for


@contextmanager
def local_sweep(points: Sequence[Point], config_dirs: Sequence[str]) -> Iterator[LocalSweep]:
    """Open the sweep that begins with these points, and handle signals.

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
        yield LocalSweep(sweep_id, folder, objective_of(config), noted, relay, config_dirs)


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
                ["sweep.jobs", "cluster.kind"],
            )
    gpus = find_gpus(environ)
    there = 0 if gpus.problem else len(gpus.names)
    if not there:
        return [{} for _ in range(jobs)]
    if any(cluster.gpus is None for cluster in exclusive):
        raise ConfigError(
            f"sweep.jobs={jobs}, but each run takes all {there} GPUs of this machine",
            f"Say how many each run is to have: cluster.gpus={max(there // jobs, 1)}.",
            ["sweep.jobs", "cluster.gpus"],
        )
    each = max(cluster.gpus or 0 for cluster in exclusive)
    if each * jobs > there:
        raise ConfigError(
            f"sweep.jobs={jobs} runs with cluster.gpus={each} need {each * jobs} GPUs, but this "
            f"machine has {there}",
            f"Set sweep.jobs={max(there // each, 1)} or less, or fewer cluster.gpus.",
            ["sweep.jobs", "cluster.gpus"],
        )
    pool = local_pool(replace(exclusive[0], gpus=there), gpus, environ.get("CUDA_VISIBLE_DEVICES"))
    ids = pool.gpu_ids
    return [{"CUDA_VISIBLE_DEVICES": ",".join(ids[each * n : each * (n + 1)])} for n in range(jobs)]
