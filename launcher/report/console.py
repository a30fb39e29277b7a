"""Console output of a run: live progress on a terminal, plain lines on a pipe.

A process has one rich console, made by `make_console`. Off a terminal it writes plain lines only,
without colour or cursor movement, even if FORCE_COLOR is set. NO_COLOR is obeyed.
"""

from __future__ import annotations

import errno
import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Self, TextIO

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from launcher.base import Advance, discard
from launcher.report.text import clock_text, loss_text, rate_text, seconds_text
from launcher.report.trackers.tracker import Metrics, Tracker

PLAIN_WIDTH = 100
SILENCE = 30.0  # seconds without a line of a phase on a pipe

# Errors of a full, limited or broken disk behind standard output, or of a closed terminal (EIO).
_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})


def make_console(file: TextIO | None = None) -> RunConsole:
    """Return a console on `file` (standard output by default).

    It is as wide as the terminal, or 100 columns off one.
    """
    plain: dict[str, Any] = {}
    stream = file or sys.stdout
    if stream is None or not stream.isatty():  # None: `>&-`
        plain = {"force_terminal": False, "force_interactive": False, "width": PLAIN_WIDTH}
    return RunConsole(file=file, highlight=False, markup=False, emoji=False, **plain)


class RunConsole(Console):
    """A console that falls silent where rich would end the run.

    That is when nobody reads the output any more (`| head`), or the disk it goes to is full.

    Attributes:
        phases: called with each phase that `status` shows, how much of it is done, and of how much;
            None, None: it begins.
        open_line: the text of a phase whose line is begun and not ended, off a terminal.
    """

    phases: tuple[Callable[[Phase, float | None, float | None, str], None], ...] = ()
    open_line: str = ""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, on a line of its own."""
        if self.open_line:
            self.open_line = ""
            super().print()
        super().print(*objects, **options)

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Print nothing from now on."""
        self.quiet = True
        discard(1)


def line_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints one line as it is, however long it is."""
    return functools.partial(console.print, soft_wrap=True, markup=False, highlight=False)


def table_of(
    headers: Iterable[str], rows: Iterable[Iterable[str | Text]], left: Collection[str] = ()
) -> Table:
    """Return a table without a frame, the same on a terminal and on a pipe.

    Args:
        headers: the header of each column.
        rows: the cells of each row; those too wide for the console are folded.
        left: the headers of columns that are aligned to the left, not to the right.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for header in headers:
        justify: JustifyMethod = "left" if header in left else "right"
        table.add_column(header, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


class Phase(StrEnum):
    """The phases of a run until it ends: `phase` in its `status.json`."""

    STARTING = "starting"
    READING = "reading"
    MEASURING = "measuring"
    PLANNING = "planning"
    TRYING = "trying"
    COMPILING = "compiling"
    WARMING_UP = "warming_up"
    TRAINING = "training"
    RESTARTING = "restarting"
    MIRRORING = "mirroring"


@contextmanager
def status(console: Console, text: str, phase: Phase | None = None) -> Iterator[Advance]:
    """Show a phase and its progress, and at the end the time it took.

    On a terminal there is a line with a running clock while the block runs, and a bar with the time
    left where its progress is known. One line remains, `<text> ... 3.2 s`; off a terminal it
    is all that is printed, but for a line every half minute.

    Args:
        console: the console.
        text: the phase in words.
        phase: the phase in the run's `status.json`.

    Yields:
        `advance(share)`, or `advance(done, total, "programs")`, where a total of None is not known.
    """
    shown_to = getattr(console, "phases", ()) if phase else ()
    for show in shown_to:
        show(phase, None, None, "")
    kind = _Bar if console.is_interactive else _PlainLines
    with kind(console, text) as shown:

        def advance(done: float, total: float | None = 1.0, unit: str = "") -> None:
            for show in shown_to:
                show(phase, done, total, unit)
            shown.advance(done, total, unit)

        yield advance


class _PlainLines:
    """A phase off a terminal: `<text> ... 3.2 s`, and in between a line every half minute."""

    def __init__(self, console: Console, text: str) -> None:
        self._console, self._text = console, text

    def __enter__(self) -> Self:
        self._began = self._said = time.monotonic()
        self._console.print(f"{self._text} ... ", end="", soft_wrap=True)
        if isinstance(self._console, RunConsole):
            self._console.open_line = self._text
        return self

    def advance(self, done: float, total: float | None, unit: str) -> None:
        now = time.monotonic()
        if now - self._said < SILENCE or not done or done == total:
            return
        self._said, taken = now, now - self._began
        line = f"{self._text}: {far_text(done, total, unit)} in {clock_text(taken)}"
        if total is not None:
            line += f", about {clock_text(taken / done * (total - done))} left"
        self._console.print(line, soft_wrap=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        ending = _ending(kind, self._began)
        if isinstance(self._console, RunConsole):
            if self._console.open_line != self._text:  # something else was printed
                ending = f"{self._text} ... {ending}"
            self._console.open_line = ""
        self._console.print(ending, soft_wrap=True)


def far_text(done: float, total: float | None, unit: str) -> str:
    """Return how far a phase has come, such as "3 of 12 programs" or "25%"."""
    if total is None:
        return f"{done:,.0f} {unit}"
    return f"{done:g} of {total:g} {unit}".rstrip() if total != 1.0 or unit else f"{done:.0%}"


def _ending(kind: type[BaseException] | None, began: float) -> str:
    """Return how a phase has ended, that an exception of this class left."""
    taken = seconds_text(time.monotonic() - began)
    if kind is None:
        return taken
    return f"{'stopped' if issubclass(kind, KeyboardInterrupt) else 'failed'} after {taken}"


class _Bar:
    """A phase on a terminal: a line that changes while it lasts, and then one that stays."""

    def __init__(self, console: Console, text: str) -> None:
        self._console, self._text, self._unit = console, text, ""
        shape = "dots" if console.encoding.startswith("utf") else "line"
        self._progress = Progress(
            SpinnerColumn(shape),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            _Known(BarColumn(20)),
            _Known(TimeRemainingColumn()),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task(text, total=None)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._progress.start()
        return self

    def advance(self, done: float, total: float | None, unit: str) -> None:
        text = self._text
        if total is None:  # which `update` would take for no change
            self._progress.tasks[0].total = None
        if unit:
            self._unit = "" if total is None else f" {total:g} {unit}"
            text += f" {far_text(done, total, unit)}"
        # Shares come by the thousand; what is counted takes seconds each.
        self._progress.update(
            self._task, completed=done, total=total, description=text, refresh=bool(unit)
        )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._progress.stop()
        ending = _ending(kind, self._began)
        line = Text(f"{self._text}{self._unit} ... ").append(ending, style="dim")
        self._console.print(line, soft_wrap=True)


class _Known(ProgressColumn):
    """A column that is empty until the total is known."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        """Return the column of a phase whose progress is known."""
        return Text("") if task.total is None else self._column(task)


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
