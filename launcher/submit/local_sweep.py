"""Runs the points of a sweep one after another, each in a launcher process and folder of its own.

There is a process for each run, because JAX, Ray and the GPUs' memory belong to a process for its
life.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from launcher.config.compose import Point
from launcher.config.errors import ConfigError
from launcher.config.machines import SlurmCluster, slurm_of
from launcher.config.overrides import written
from launcher.config.schema import Config, Run
from launcher.driver.check import check
from launcher.follow import follow
from launcher.output import answer, complain
from launcher.report.console import make_console
from launcher.report.sweep import print_comparison, report_sweep

_FOLDER = "multirun"  # unless run.dir says otherwise

# For each signal to the sweep: the signal that its run gets, and the sweep's exit code.
_STOPS = {
    signal.SIGINT: (signal.SIGINT, 130),
    signal.SIGTERM: (signal.SIGTERM, 75),
    signal.SIGHUP: (signal.SIGTERM, 75),  # the terminal is gone
    signal.SIGUSR1: (signal.SIGTERM, 75),
    signal.SIGUSR2: (signal.SIGTERM, 75),
}


def run_sweep(points: Sequence[Point], config_dirs: Sequence[str]) -> int:
    """Run every point in `<multirun>/<sweep id>/<sweep id>-<n>` and print a comparison.

    A run that fails does not stop the others. A signal stops the current run, which saves its
    state, and the sweep with it.

    Args:
        points: the runs, whose settings are consistent.
        config_dirs: the values of `--config-dir`.

    Returns:
        The exit code: 0 if all runs ended well, 130 or 75 if a signal stopped the sweep, otherwise
            1.
    """
    sweep_id, folder = place_sweep(points)
    run_dirs: list[Path] = []
    failed = False
    with SignalRelay() as relay:
        for number, point in enumerate(points):
            run_id = f"{sweep_id}-{number}"
            answer(f"[{number + 1}/{len(points)}] {point.label}")
            code = relay.run(_command(point, config_dirs, folder, run_id, sweep_id))
            run_dirs.append(folder / run_id)
            if relay.received is not None:
                break
            if code:
                failed = True
                complain(f"{point.label} ended with exit code {code}")
    existing = [path for path in run_dirs if path.is_dir()]
    if existing:
        print_comparison(make_console(), existing)
        report_sweep(make_console(), folder, existing)
    return int(failed) if relay.received is None else _STOPS[relay.received][1]


def place_sweep(points: Sequence[Point]) -> tuple[str, Path]:
    """Return the sweep's id and folder, from run.id and run.dir if they are set.

    Raises:
        ConfigError: run.id or run.dir is swept.
    """
    runs = {(point.config.run.id, point.config.run.dir) for point in points}
    if len(runs) > 1:
        raise ConfigError(
            "run.id and run.dir cannot be swept",
            "In a sweep run.id names the whole sweep; its runs are <run.id>-0, -1, ….",
        )
    [(run_id, run_dir)] = runs
    sweep_id = run_id or f"sweep-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return sweep_id, Path(_FOLDER if run_dir == Run().dir else run_dir) / sweep_id


def members(points: Sequence[Point], sweep_id: str, folder: Path) -> list[Config]:
    """Return the settings of the runs of a sweep, each with a folder of its own."""
    return [
        replace(
            point.config,
            run=replace(point.config.run, id=f"{sweep_id}-{number}", dir=str(folder)),
            wandb=replace(point.config.wandb, group=point.config.wandb.group or sweep_id),
        )
        for number, point in enumerate(points)
    ]


def check_jobs(configs: Sequence[Config]) -> None:
    """Check that the runs of a sweep can be submitted to Slurm together.

    Raises:
        ConfigError: they cannot.
    """
    if any(not isinstance(config.cluster, SlurmCluster) for config in configs):
        raise ConfigError(
            "cluster is swept, and some of its options are not slurm",
            "Submit those runs in a sweep of their own.",
            ["cluster.kind"],
        )
    if any(slurm_of(config.cluster).wait for config in configs):
        raise ConfigError(
            "cluster.slurm.wait=true follows one run, but this is a sweep",
            "Leave it out; task=sweep_status shows how they are doing.",
            ["cluster.slurm.wait"],
        )
    is_array = slurm_of(configs[0].cluster).array is not None
    # An array has one script with one command line.
    if is_array and any(config.allow_modules != configs[0].allow_modules for config in configs):
        raise ConfigError(
            "The runs of a job array cannot be allowed different modules",
            "Allow every run all of them, or set cluster.slurm.array=null for a job each.",
            ["allow_modules", "cluster.slurm.array"],
        )
    if is_array and any(config.cluster != configs[0].cluster for config in configs):
        raise ConfigError(
            "The runs of a job array cannot have different settings of the cluster",
            "Set cluster.slurm.array=null for a job each.",
            ["cluster.slurm.array"],
        )


def check_sweep(points: Sequence[Point], wrong: Mapping[str, ConfigError]) -> int:
    """Check every run of a sweep as `task=check` does, and print all problems.

    Args:
        points: the runs whose settings could be composed.
        wrong: the errors of the others, by label.

    Returns:
        The exit code, 2 if any setting is wrong.
    """
    configs = members(points, *place_sweep(points))
    if any(isinstance(config.cluster, SlurmCluster) for config in configs):
        check_jobs(configs)
    verdicts = [check(config, os.environ) for config in configs]
    problems = {label: str(error) for label, error in wrong.items()}
    problems |= {
        point.label: verdict.problem
        for point, verdict in zip(points, verdicts, strict=True)
        if verdict.problem
    }
    for label, problem in problems.items():
        complain(f"{label}: {problem}")
    if problems:
        return max([2 for _ in wrong] + [verdict.code for verdict in verdicts])
    lines = dict.fromkeys(line for verdict in verdicts for line in verdict.lines)
    return answer("\n".join([f"The settings of all {len(points)} runs are fine.", *lines]))


def _command(
    point: Point, config_dirs: Sequence[str], folder: Path, run_id: str, sweep_id: str
) -> list[str]:
    command = [sys.executable, "-m", "launcher"]
    for config_dir in config_dirs:
        command += ["--config-dir", config_dir]
    command += point.overrides
    command += [f"run.dir={written(str(folder))}", f"run.id={written(run_id)}"]
    if point.config.wandb.group is None and point.config.wandb.mode != "disabled":
        command += [f"wandb.group={written(sweep_id)}"]
    return command


class SignalRelay:
    """Runs one process at a time and passes the signals of `_STOPS` on to it.

    The process has a process group of its own, so that Ctrl-C in a terminal reaches it once, from
    here, and not twice.

    Attributes:
        received: the first signal that came, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SignalRelay:
        heeded = [s for s in _STOPS if signal.getsignal(s) is not signal.SIG_IGN]  # as by nohup
        self._previous = {signum: signal.signal(signum, self._handle) for signum in heeded}
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def run(self, command: Sequence[str]) -> int:
        """Run `command` to its end and return its exit code."""
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=follow
        ) as self._child:
            if self.received is not None:  # it came while the process was being made
                self._child.send_signal(_STOPS[self.received][0])
            return self._child.wait()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        received = signal.Signals(signum)
        self.received = self.received or received
        if self._child is not None:
            self._child.send_signal(_STOPS[received][0])
