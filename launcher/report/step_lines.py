"""The lines of a run's steps on its console, and the live display above which they stay."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from launcher.report.text import clock_text, loss_text, rate_text, seconds_text
from launcher.report.trackers.tracker import Metrics, Tracker

LINES_ON_TERMINAL = 10  # the lines that stay above the live display, besides evaluations
LINES_ON_PIPE = 50
LONGEST_SILENCE = 60.0  # seconds without a line on a pipe, however long the run is
ETA_WINDOW = 50  # logged steps that the time left is estimated from


class ConsoleTracker(Tracker):
    """Shows steps as they are logged.

    On a terminal a bar and the newest figures are kept up to date while the run lasts. Permanent
    lines are printed for the first and the last step, for each evaluation, and at round step
    numbers: about ten a run on a terminal; off one about fifty, and at least one a minute.

    Args:
        console: the console to print to.
        steps: the step at which training ends.
        first_step: the first step of this process, more than 1 where a run is resumed.
        clock: a monotonic clock in seconds, for the time left.
    """

    def __init__(
        self,
        console: Console,
        steps: int,
        first_step: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._steps = steps
        self._clock = clock
        self._recent: deque[tuple[float, int]] = deque(maxlen=ETA_WINDOW)
        self._unprinted: str | None = None  # the newest line, where it has not been printed
        self._printed: tuple[float, int] | None = None  # when the last line was, and its step
        self._live = _LiveDisplay(console, steps, first_step) if console.is_interactive else None
        self._interval = round_up(steps / (LINES_ON_TERMINAL if self._live else LINES_ON_PIPE))

    def log(self, step: int, metrics: Metrics) -> None:
        """Update the live display, and print a line where one is due."""
        now = self._clock()
        self._recent.append((now, step))
        figures, left = _figures_text(metrics), self._time_left()
        self._unprinted = f"step {step:>{len(str(self._steps))}}/{self._steps}  {figures}"
        if self._live:
            self._live.update(step, figures, left)
        elif left:
            self._unprinted += f"  {left}"
        if self._is_milestone(now, step) or metrics.get("eval/loss") is not None:
            self._print_newest()
            self._printed = (now, step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Remove the live display and print the newest step, unless it has been printed."""
        if self._live:
            self._live.stop()
        self._print_newest()

    def _print_newest(self) -> None:
        if self._unprinted:
            self._console.print(self._unprinted, soft_wrap=True)
        self._unprinted = None

    def _is_milestone(self, now: float, step: int) -> bool:
        if self._printed is None or step >= self._steps:
            return True
        then, printed_step = self._printed
        if not self._live and now - then >= LONGEST_SILENCE:
            return True
        return step // self._interval > printed_step // self._interval

    def _time_left(self) -> str:
        (start, first), (now, step) = self._recent[0], self._recent[-1]
        if not first < step < self._steps:
            return ""
        return f"{clock_text((now - start) / (step - first) * (self._steps - step))} left"


def _figures_text(metrics: Metrics) -> str:
    """Return the newest figures in one line: loss, throughput, step time, evaluation."""
    parts = [f"loss {loss_text(metrics.get('train/loss')):<6}"]
    for unit in ("tokens", "samples"):
        if (rate := metrics.get(f"perf/{unit}_per_second")) is not None:
            parts.append(rate_text(rate, unit))
            break
    if (seconds := metrics.get("perf/step_seconds")) is not None:
        parts.append(f"{seconds_text(seconds)}/step")
    if (evaluation := metrics.get("eval/loss")) is not None:
        parts.append(f"eval {loss_text(evaluation)}")
    return "  ".join(parts)


def round_up(interval: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that is at least `interval`."""
    power = 1
    while power * 5 < interval:
        power *= 10
    return next(power * digit for digit in (1, 2, 5) if power * digit >= interval)


class _LiveDisplay:
    """A progress bar and, below it, the newest figures; `stop` removes both."""

    def __init__(self, console: Console, steps: int, first_step: int) -> None:
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(None),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=console,
        )
        self._task = self._bar.add_task("", total=steps, completed=first_step - 1)
        waiting = Text("waiting for the first step", style="dim")
        self._live = Live(Group(self._bar, waiting), console=console, transient=True)
        self._live.start()

    def update(self, step: int, figures: str, left: str) -> None:
        self._bar.update(self._task, completed=step, description=left)
        self._live.update(Group(self._bar, Text(figures, style="cyan", no_wrap=True)))

    def stop(self) -> None:
        self._live.stop()
