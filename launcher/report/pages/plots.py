"""Plots of a run: its loss, its memory and the timelines of a step; a process that draws them.

Matplotlib is imported only when a plot is drawn, and used without global state (no pyplot).
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.base import write_whole
from launcher.report.text import bytes_text, loss_text, percent_text, seconds_text
from launcher.schedule import Kind, Task, TimedTask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from launcher.base import Span
    from launcher.plan import Plan

# Okabe and Ito's colours, which colour-blind readers can tell apart.
TRAIN, EVAL = "#0072B2", "#D55E00"
IDLE = "#ECECEC"
INK = "#333333"
SMOOTHED_FROM = 80  # logged steps


def plot_loss(records: Sequence[Mapping[str, Any]], path: Path, title: str = "") -> Path:
    """Draw the training loss, smoothed where it is long, and the evaluation loss.

    Args:
        records: logged steps, as `jsonl.read_metrics` returns them.
        path: the PNG file to write; its folder is created.
        title: the title of the plot.

    Returns:
        `path`.
    """
    from matplotlib.ticker import MaxNLocator

    figure, [axes] = canvas(width=8.0, height=4.5)
    steps, losses = _series(records, "train/loss")
    name, marker = "train", "o" if len(losses) == 1 else ""
    if len(losses) >= SMOOTHED_FROM:
        axes.plot(steps, losses, color=TRAIN, alpha=0.3, linewidth=0.8)
        name, losses = "train (smoothed)", smoothed(losses, window=2 * (len(losses) // 40) + 1)
    train: dict[str, Any] = {"linewidth": 1.8, "color": TRAIN, "marker": marker}
    other: dict[str, Any] = {"linewidth": 1.2, "color": EVAL, "marker": "o", "markersize": 4.5}
    evals = *_series(records, "eval/loss"), "validation", other
    for places, values, label, style in ((steps, losses, name, train), evals):
        if values:
            axes.plot(places, values, label=f"{label}: {loss_text(values[-1])}", **style)
    if losses or evals[1]:
        axes.legend(frameon=False, labelcolor=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(color="#E6E6E6", linewidth=0.8)
    axes.margins(x=0.02)
    return save_figure(figure, path)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of the `window` values around each value (an odd number).

    At both ends, where there are fewer, it is the line that best fits the outermost `window`
    values, so that no single value bends it.
    """
    from scipy.signal import savgol_filter

    return [float(value) for value in savgol_filter(values, window, polyorder=1)]


def _series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of a metric, where it is known and finite."""
    known = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    known = [(step, value) for step, value in known if math.isfinite(value)]
    return [step for step, _ in known], [value for _, value in known]


def canvas(
    width: float, height: float, heights: Sequence[float] = (1.0,)
) -> tuple[Figure, list[Axes]]:
    """Return an empty figure of that size in inches, without the boxes around the axes.

    Args:
        width: its width.
        height: its height.
        heights: the relative heights of its axes, one below the other.
    """
    # It warns where building the font cache takes five seconds, once a user.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    found = figure.subplots(len(heights), height_ratios=list(heights), squeeze=False)
    for axes in found.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK)
    return figure, list(found.flat)


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG file, whose folder is created; return `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    # Of flat colours, which are small anyway; best compression takes most of the time.
    figure.savefig(picture, dpi=150, format="png", pil_kwargs={"compress_level": 1})
    write_whole(path, picture.getvalue())
    return path


def plot_memory(plan: Plan, measured: int | None, path: Path, title: str = "") -> Path:
    """Draw each stage's predicted memory of a device, and the peak of all as a line.

    Args:
        plan: the plan.
        measured: the measured peak in bytes, None where it is unknown.
        path: the PNG file to write; its folder is created.
        title: the title of the plot.

    Returns:
        `path`.
    """
    stages = range(len(plan.stages))
    used = [stage.memory_bytes for stage in plan.stages]
    capacity = plan.cluster.get("memory_bytes")
    figure, [axes] = canvas(width=8.0, height=1.6 + 0.35 * len(used))
    unit = 2.0**30 if max([*used, measured or 0]) >= 2**30 else 2.0**20
    if capacity is not None:
        axes.barh(stages, capacity / unit, color=IDLE, label=f"there is: {bytes_text(capacity)}")
    axes.barh(stages, [each / unit for each in used], color=TRAIN, label="predicted")
    if measured is not None:
        label = f"measured, at most: {bytes_text(measured)}"
        axes.axvline(measured / unit, color=EVAL, linewidth=1.8, label=label)
    axes.set_yticks(stages, [f"stage {stage}" for stage in stages])
    axes.invert_yaxis()
    axes.set_xlabel("memory of a device, " + ("GiB" if unit == 2.0**30 else "MiB"))
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False, labelcolor=INK, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return save_figure(figure, path)


TASK_COLOURS = {
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "backward_input": "#E69F00",
    "backward_weight": "#CC79A7",
    "forward_backward": "#F0E442",
}
COLOURS = defaultdict(
    lambda: "#009E73", TASK_COLOURS | {"update": "#0072B2", "gradient sum": "#D55E00"}
)
SMALLEST_NUMBER = 4.0  # points
MOST_NUMBERED_TASKS = 2000  # more numbers would be unreadable and slow to draw
_HEIGHT = 0.86  # of a box, in rows
_MARGIN = 1.5  # inches beside the axes
Arrow = tuple[tuple[int, float], tuple[int, float]]
_ARROW: dict[str, Any] = {"color": INK, "linewidth": 0.7, "marker": "o", "markersize": 2.5}


@dataclass(frozen=True)
class Box:
    """A box of the picture, in seconds from the step's beginning."""

    row: int
    kind: str
    start: float
    end: float
    number: int | None = None


@dataclass(frozen=True)
class Picture:
    """One timeline of the picture.

    Attributes:
        title: what stands above it.
        rows: the names of its rows, of the meshes.
        boxes: tasks, updates, and sums of gradients, which are drawn low over their row's others.
        arrows: transfers, from (row, time) to (row, time).
        idle_until: up to where a row is idle where there is no box.
        total: the step's seconds.
    """

    title: str
    rows: Sequence[str]
    boxes: Sequence[Box]
    arrows: Sequence[Arrow]
    idle_until: float
    total: float


def plot_timeline(
    timeline: Sequence[TimedTask],
    path: Path,
    title: str = "",
    step_seconds: float | None = None,
    measured: Mapping[int, Sequence[Span]] | None = None,
) -> Path:
    """Draw a step: a row a mesh, a box a task with its microbatch.

    Args:
        timeline: the tasks that `schedule.simulate` returns, at least one.
        path: the PNG file to write; its folder is created.
        title: the name of the plan, put before the step's duration and its bubble.
        step_seconds: the plan's predicted step time. The time after the last task is drawn as
            gradient sums and update; None draws none.
        measured: the spans of recorded steps by the number of the step; the last one is drawn.

    Returns:
        `path`.
    """
    pictures: list[Picture] = []
    for step in sorted(measured or {})[-1:]:
        if picture := measured_picture((measured or {})[step], f"measured, step {step}"):
            pictures = [picture]
            title = f"{title}, predicted".lstrip(", ")
    pictures.insert(0, predicted_picture(timeline, title, step_seconds))
    total = max(picture.total for picture in pictures)
    boxes = max(len(picture.boxes) / len(picture.rows) for picture in pictures)
    width = min(24.0, max(9.0, 0.2 * boxes + 5.0))
    heights = [0.8 + 0.5 * min(len(picture.rows), 32) for picture in pictures]
    figure, axes = canvas(width, 1.0 + sum(heights), heights)
    factor, unit = (1.0, "s") if total >= 10 else (1e3, "ms") if total >= 1e-3 else (1e6, "us")
    for picture, below in zip(pictures, axes, strict=True):
        _draw(below, picture, factor, inches_per_second=(width - _MARGIN) / total)
        below.set_xlim(0, total * factor)
    axes[-1].set_xlabel(f"{'' if measured else 'predicted '}time in the step ({unit})")
    figure.legend(
        handles=_legend(
            [box.kind for picture in pictures for box in picture.boxes],
            any(picture.arrows for picture in pictures),
        ),
        loc="outside lower center",
        ncols=8,
        frameon=False,
        labelcolor=INK,
    )
    return save_figure(figure, path)


def predicted_picture(
    timeline: Sequence[TimedTask], title: str, step_seconds: float | None
) -> Picture:
    """Return the timeline that the plan expects; see `plot_timeline`."""
    meshes = range(1 + max(timed.mesh for timed in timeline))
    end = max(timed.end for timed in timeline)
    total = max(end, step_seconds or 0.0)
    boxes = [Box(t.mesh, t.task.kind.value, t.start, t.end, t.task.microbatch) for t in timeline]
    boxes += [Box(mesh, "update", end, total) for mesh in meshes if total > end]
    stages = [{timed.task.stage for timed in timeline if timed.mesh == m} for m in meshes]
    return _picture(title, stages, boxes, (), end)


def _picture(
    title: str,
    stages: Sequence[set[int]],
    boxes: Sequence[Box],
    arrows: Sequence[Arrow],
    end: float,
) -> Picture:
    """Return a timeline with its figures: `end` is the last task's, `stages` those of the rows."""
    total = max(box.end for box in boxes)
    busy = sum(_covered([b for b in boxes if b.row == row], end) for row in range(len(stages)))
    figures = f"{seconds_text(total)} a step, {percent_text(1 - busy / (end * len(stages)))} idle"
    heading = f"{title}: {figures}" if title else figures
    rows = [f"stage{'s' * (len(s) != 1)} {', '.join(map(str, sorted(s)))}" for s in stages]
    in_order = sorted(boxes, key=lambda box: (box.kind == "gradient sum", box.start))
    return Picture(heading, rows, in_order, arrows, end, total)


def measured_picture(spans: Sequence[Span], title: str) -> Picture | None:
    """Return the timeline of a recorded step, or None if no device's lane is in it.

    What a mesh runs is drawn from when its first device begins to when its last one ends.
    """
    merged: dict[tuple[Any, ...], list[Span]] = {}
    for span in spans:
        if span.lane.startswith("device") and span.kind not in ("collective", "other"):
            key = span.about["mesh"], span.kind, span.name, span.about["program"]
            merged.setdefault((*key, span.about.get("microbatch")), []).append(span)
    if not any(kind in TASK_COLOURS for _, kind, *_ in merged):
        return None
    origin = min(span.start for same in merged.values() for span in same)

    def since(time: int) -> float:
        return (time - origin) / 1e9

    row_of = {mesh: row for row, mesh in enumerate(sorted({mesh for mesh, *_ in merged}))}
    boxes: list[Box] = []
    stages: list[set[int]] = [set() for _ in row_of]
    for (mesh, kind, *_, microbatch), same in merged.items():
        start, end = min(s.start for s in same), max(s.end for s in same)
        is_task = kind in TASK_COLOURS
        number = microbatch if is_task else None
        boxes.append(Box(row_of[mesh], kind, since(start), since(end), number))
        if is_task:
            stages[row_of[mesh]].add(same[0].about["stage"])
    arrows = [
        ((row_of[s.about["src_mesh"]], since(s.start)), (row_of[s.about["dst_mesh"]], since(s.end)))
        for s in spans
        if s.kind == "transfer" and {s.about["src_mesh"], s.about["dst_mesh"]} <= row_of.keys()
    ]
    last = max(box.end for box in boxes if box.kind in TASK_COLOURS)
    return _picture(title, stages, boxes, arrows, last)


def _covered(boxes: Sequence[Box], end: float) -> float:
    """Return the seconds up to `end` in which at least one of the boxes is."""
    covered, until = 0.0, 0.0
    for box in sorted(boxes, key=lambda box: box.start):
        covered += max(0.0, min(box.end, end) - max(box.start, until))
        until = max(until, box.end)
    return covered


def _draw(axes: Axes, picture: Picture, factor: float, inches_per_second: float) -> None:
    rows = range(len(picture.rows))
    axes.barh(rows, picture.idle_until * factor, color=IDLE, height=_HEIGHT)
    is_fine = len(picture.boxes) <= MOST_NUMBERED_TASKS
    for kind in dict.fromkeys(box.kind for box in picture.boxes):
        boxes = [box for box in picture.boxes if box.kind == kind]
        is_sum = kind == "gradient sum"
        for row in sorted({box.row for box in boxes}):  # one collection: fast for any number
            axes.broken_barh(
                [(b.start * factor, (b.end - b.start) * factor) for b in boxes if b.row == row],
                (row + 0.21, 0.22) if is_sum else (row - _HEIGHT / 2, _HEIGHT),
                facecolor=COLOURS[kind],
                edgecolor="white",
                linewidth=0.6 if is_fine and (is_sum or kind in TASK_COLOURS) else 0.0,
                zorder=3 if is_sum else 2,
            )
        if is_fine:
            _number(
                [box for box in boxes if box.number is not None], axes, factor, inches_per_second
            )
    for (src, start), (dst, end) in picture.arrows if is_fine else ():
        # A dot at the end, where the arrays are there.
        axes.plot([start * factor, end * factor], [src, dst], markevery=[1], zorder=4, **_ARROW)
    axes.set_yticks(rows, picture.rows)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_title(picture.title, loc="left", fontsize=11)


def _number(boxes: Sequence[Box], axes: Axes, factor: float, inches_per_second: float) -> None:
    """Write each microbatch's number into its box, all in one size, where there is room."""
    longest = max((len(str(box.number)) for box in boxes), default=1)
    points = 72 * inches_per_second / (0.75 * longest)  # of a number, for each second of a box
    fitting = [box for box in boxes if (box.end - box.start) * points >= SMALLEST_NUMBER]
    if fitting:
        places = [((box.start + box.end) / 2 * factor, box.row) for box in fitting]
        size = min(9.0, *((box.end - box.start) * points for box in fitting))
        _write([str(box.number) for box in fitting], places, size, axes)


def _write(
    numbers: Sequence[str], places: Sequence[tuple[float, float]], size: float, axes: Axes
) -> None:
    """Write numbers at their places, all as one collection: as texts they take a millisecond each.

    Args:
        numbers: the numbers.
        places: the middle of each, in the units of the axes.
        size: of the font, in points.
        axes: where they are written.
    """
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path as Outline
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    def centred(number: str) -> Outline:
        drawn = TextPath((0, 0), number, size=size)
        return Outline(drawn.vertices - drawn.get_extents().get_points().mean(0), drawn.codes)

    outlines = {number: centred(number) for number in dict.fromkeys(numbers)}
    points = Affine2D().scale(1 / 72) + axes.figure.dpi_scale_trans
    written = PathCollection(
        [outlines[number] for number in numbers],
        offsets=places,
        offset_transform=axes.transData,
        facecolor=INK,
        linewidth=0,
        zorder=5,
        label="numbers",
    )
    written.set_transform(points)
    axes.add_collection(written, autolim=False)


def _legend(kinds: Sequence[str], transfers: bool) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    labels = {} if "gradient sum" in kinds else {"update": "gradient sums, update"}
    labels["gradient sum"] = "gradient sums"
    handles = [
        Patch(color=COLOURS[kind], label=labels.get(kind, kind.replace("_", ", ")))
        for kind in dict.fromkeys(kinds)
    ]
    handles.append(Patch(color=IDLE, label="idle (bubble)"))
    return [*handles, *([Line2D([], [], label="transfer", **_ARROW)] if transfers else [])]


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
