"""Plots of a run: the loss over its steps, and the simulated timeline of its pipeline.

Matplotlib is imported only when a plot is drawn, and used without global state (no pyplot).
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.files import write_whole
from launcher.report.text import loss_text, percent_text, seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from launcher.schedule import TimedTask

# Okabe and Ito's colours, which colour-blind readers can tell apart.
TRAIN, EVAL = "#0072B2", "#D55E00"
TASK_COLOURS = {
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "backward_input": "#E69F00",
    "backward_weight": "#CC79A7",
}
OTHER_TASK = "#009E73"
UPDATE = "#0072B2"
IDLE = "#ECECEC"
INK = "#333333"
SMOOTHED_FROM = 80  # logged steps
SMALLEST_NUMBER = 4.0  # points
MOST_NUMBERED_TASKS = 2000  # more numbers would be unreadable and slow to draw


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

    figure, axes = _canvas(width=8.0, height=4.5)
    steps, losses = _series(records, "train/loss")
    line: dict[str, Any] = {
        "linewidth": 1.8,
        "color": TRAIN,
        "marker": "o" if len(losses) == 1 else "",
    }
    if len(losses) >= SMOOTHED_FROM:
        axes.plot(steps, losses, color=TRAIN, alpha=0.3, linewidth=0.8)
        smooth = smoothed(losses, window=2 * (len(losses) // 40) + 1)
        axes.plot(steps, smooth, label=f"train (smoothed): {loss_text(smooth[-1])}", **line)
    elif losses:
        axes.plot(steps, losses, label=f"train: {loss_text(losses[-1])}", **line)
    eval_steps, evals = _series(records, "eval/loss")
    if evals:
        line = {"linewidth": 1.2, "color": EVAL, "marker": "o", "markersize": 4.5}
        axes.plot(eval_steps, evals, label=f"validation: {loss_text(evals[-1])}", **line)
    if losses or evals:
        axes.legend(frameon=False, labelcolor=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(color="#E6E6E6", linewidth=0.8)
    axes.margins(x=0.02)
    return _save(figure, path)


def plot_timeline(
    timeline: Sequence[TimedTask],
    path: Path,
    title: str = "",
    step_seconds: float | None = None,
) -> Path:
    """Draw one simulated step: a row a mesh, a box a task with its microbatch.

    Args:
        timeline: the tasks that `schedule.simulate` returns, at least one.
        path: the PNG file to write; its folder is created.
        title: the name of the plan, put before the step's duration and its bubble.
        step_seconds: the plan's predicted step time. The time after the last task is drawn as
            gradient sums and update; None draws none.

    Returns:
        `path`.
    """
    from matplotlib.patches import Patch

    meshes = 1 + max(timed.mesh for timed in timeline)
    tasks_end = max(timed.end for timed in timeline)
    total = max(tasks_end, step_seconds or 0.0)
    busy = sum(timed.end - timed.start for timed in timeline)
    width = min(24.0, max(9.0, 0.2 * len(timeline) / meshes + 5.0))
    figure, axes = _canvas(width, height=1.8 + 0.5 * min(meshes, 32))
    factor, unit = (1.0, "s") if total >= 10 else (1e3, "ms") if total >= 1e-3 else (1e6, "us")
    axes.barh(range(meshes), tasks_end * factor, color=IDLE, height=0.86)
    axes.barh(
        range(meshes),
        (total - tasks_end) * factor,
        left=tasks_end * factor,
        color=UPDATE,
        height=0.86,
    )
    kinds = list(dict.fromkeys(timed.task.kind.value for timed in timeline))
    for kind in kinds:
        tasks = [timed for timed in timeline if timed.task.kind.value == kind]
        for mesh in sorted({timed.mesh for timed in tasks}):  # one collection: fast for any number
            axes.broken_barh(
                [
                    (timed.start * factor, (timed.end - timed.start) * factor)
                    for timed in tasks
                    if timed.mesh == mesh
                ],
                (mesh - 0.43, 0.86),
                facecolor=TASK_COLOURS.get(kind, OTHER_TASK),
                edgecolor="white",
                linewidth=0.6 if len(timeline) <= MOST_NUMBERED_TASKS else 0.0,
            )
        _number_tasks(axes, tasks, factor, inches_per_second=(width - 1.5) / total)
    axes.set_yticks(range(meshes), [_stages_of(mesh, timeline) for mesh in range(meshes)])
    axes.invert_yaxis()
    axes.set_xlim(0, total * factor)
    axes.set_xlabel(f"predicted time in the step ({unit})")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    bubble = percent_text(1 - busy / (tasks_end * meshes))
    figures = f"{seconds_text(total)} a step, {bubble} idle"
    axes.set_title(f"{title}: {figures}" if title else figures, loc="left", fontsize=11)
    figure.legend(
        handles=[
            Patch(color=TASK_COLOURS.get(kind, OTHER_TASK), label=kind.replace("_", ", "))
            for kind in kinds
        ]
        + [Patch(color=IDLE, label="idle (bubble)")]
        + [Patch(color=UPDATE, label="gradient sums, update")] * (total > tasks_end),
        loc="outside lower center",
        ncols=len(kinds) + 2,
        frameon=False,
        labelcolor=INK,
    )
    return _save(figure, path)


def _stages_of(mesh: int, timeline: Sequence[TimedTask]) -> str:
    stages = sorted({timed.task.stage for timed in timeline if timed.mesh == mesh})
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


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


def _number_tasks(
    axes: Axes, tasks: Sequence[TimedTask], factor: float, inches_per_second: float
) -> None:
    """Write each microbatch's number into its box, all in one size, where there is room."""
    longest = max(len(str(timed.task.microbatch)) for timed in tasks)
    points = {t.task: (t.end - t.start) * inches_per_second * 72 / (0.75 * longest) for t in tasks}
    fitting = [size for size in points.values() if size >= SMALLEST_NUMBER]
    if not fitting or len(tasks) > MOST_NUMBERED_TASKS:
        return
    for timed in tasks:
        if points[timed.task] < SMALLEST_NUMBER:
            continue
        axes.text(
            (timed.start + timed.end) / 2 * factor,
            timed.mesh,
            str(timed.task.microbatch),
            ha="center",
            va="center",
            fontsize=min(9.0, *fitting),
            color=INK,
        )


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of that size in inches, without the box around the axes."""
    # It warns where building the font cache takes five seconds, once a user.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK)
    return figure, axes


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    write_whole(path, picture.getvalue())
    return path
