"""Runs the points of a sweep one after another, each a launcher process with a folder of its own.

A process a run, because JAX, Ray and the GPUs' memory are a process's for life. `__main__` calls
`run_sweep` with points whose settings are all checked already.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from rich.console import Console

from launcher.config.compose import Point
from launcher.config.errors import ConfigError
from launcher.config.overrides import written
from launcher.config.schema import Run
from launcher.report.sweep import comparison_table

_FOLDER = "multirun"  # unless run.dir says otherwise

# What each signal to the sweep means: the one that its run gets, and the sweep's exit code.
_STOPS = {
    signal.SIGINT: (signal.SIGINT, 130),
    signal.SIGTERM: (signal.SIGTERM, 75),
    signal.SIGHUP: (signal.SIGTERM, 75),  # the terminal is gone
}


def run_sweep(points: Sequence[Point], config_dirs: Sequence[str]) -> int:
    """Runs every point in `<multirun>/<sweep id>/<sweep id>-<n>` and prints how they compare.

    A run that fails does not stop the others. A signal stops the run in progress, which saves its
    state, and the sweep with it.

    Returns:
        The exit code: 0 where all runs ended well, 130 or 75 where a signal stopped the sweep,
        otherwise 1.
    """
    sweep_id, folder = place(points)
    texts = labels(points)
    run_dirs: list[Path] = []
    failed = False
    with SignalRelay() as relay:
        for number, (point, label) in enumerate(zip(points, texts, strict=True)):
            run_id = f"{sweep_id}-{number}"
            print(f"[{number + 1}/{len(points)}] {label}", flush=True)
            code = relay.run(_command(point, config_dirs, folder, run_id, sweep_id))
            run_dirs.append(folder / run_id)
            if relay.received is not None:
                break
            if code:
                failed = True
                print(f"launcher: {label} ended with exit code {code}", file=sys.stderr)
    existing = [path for path in run_dirs if path.is_dir()]
    if existing:
        Console().print(comparison_table(existing))
    return int(failed) if relay.received is None else _STOPS[relay.received][1]


def place(points: Sequence[Point]) -> tuple[str, Path]:
    """The sweep's id and folder: from run.id and run.dir where they were set."""
    runs = {(point.config.run.id, point.config.run.dir) for point in points}
    if len(runs) > 1:
        raise ConfigError(
            "run.id and run.dir cannot be swept",
            "In a sweep run.id names the whole sweep; its runs are <run.id>-0, -1, ….",
        )
    [(run_id, run_dir)] = runs
    sweep_id = run_id or f"sweep-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return sweep_id, Path(_FOLDER if run_dir == Run().dir else run_dir) / sweep_id


def labels(points: Sequence[Point]) -> list[str]:
    """What sets each point apart from the others."""
    shared = set.intersection(*(set(point.overrides) for point in points))
    return [
        " ".join(text for text in point.overrides if text not in shared) or "the only run"
        for point in points
    ]


def _command(
    point: Point, config_dirs: Sequence[str], folder: Path, run_id: str, sweep_id: str
) -> list[str]:
    command = [sys.executable, "-m", "launcher"]
    for config_dir in config_dirs:
        command += ["--config-dir", config_dir]
    command += point.overrides
    command += [f"run.dir={written(str(folder))}", f"run.id={written(run_id)}"]
    if point.config.wandb.group is None:
        command += [f"wandb.group={written(sweep_id)}"]
    return command


class SignalRelay:
    """Runs one process at a time and hands on the signals of `_STOPS`; remembers the first.

    The process has a process group of its own, so that Ctrl-C in a terminal reaches it once, from
    here, and not twice.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SignalRelay:
        self._previous = {signum: signal.signal(signum, self._handle) for signum in _STOPS}
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def run(self, command: Sequence[str]) -> int:
        """Runs `command` to its end and returns its exit code."""
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0) as self._child:
            if self.received is not None:  # it came while the process was being made
                self._child.send_signal(_STOPS[self.received][0])
            return self._child.wait()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        received = signal.Signals(signum)
        self.received = self.received or received
        if self._child is not None:
            self._child.send_signal(_STOPS[received][0])
