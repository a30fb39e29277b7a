"""A process that draws a plan's timeline, so that no command waits until matplotlib is imported.

It imports what it needs while its parent plans, and draws while that writes the report. Whatever
happens to it, the picture is drawn: by the parent, if need be.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.report.pages.timeline_plot import plot_timeline
from launcher.schedule import Kind, Task, TimedTask

_PROGRAM = f"from {__name__} import main; main()"
_DRAWS_WITH = ("matplotlib.figure", "matplotlib.backends.backend_agg", "PIL.PngImagePlugin")


class PlotProcess:
    """The process, from the beginning of the context to its end. It gets no signal of a terminal.

    Killed with this process still at work, it draws nothing: the pipe that it reads has ended.
    """

    def __init__(self) -> None:
        folders = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": folders},
            process_group=0,
        )
        self._asked: tuple[Sequence[TimedTask], Path, str, float] | None = None

    def __enter__(self) -> PlotProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def draw(
        self, timeline: Sequence[TimedTask], path: Path, title: str, step_seconds: float
    ) -> None:
        """Begin to draw a timeline, the only one; see `plot_timeline`."""
        self._asked = timeline, path, title, step_seconds
        tasks = [(*t.task[:2], t.task.kind.value, t.mesh, t.start, t.end) for t in timeline]
        request = json.dumps([tasks, str(path.absolute()), title, step_seconds])
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request.encode())
            self._process.stdin.close()
        except OSError:  # it has died; `wait` says so
            pass

    def wait(self) -> None:
        """Wait until the picture is there.

        Raises:
            OSError: it cannot be written.
        """
        if self._asked and self._process.wait():
            plot_timeline(*self._asked)


def main() -> None:
    """Draw the timeline read from standard input; fail where that ends early."""
    for name in _DRAWS_WITH:
        importlib.import_module(name)
    tasks, path, title, step_seconds = json.load(sys.stdin)
    timeline = [
        TimedTask(Task(stage, microbatch, Kind(kind)), mesh, start, end)
        for stage, microbatch, kind, mesh, start, end in tasks
    ]
    plot_timeline(timeline, Path(path), title, step_seconds)
