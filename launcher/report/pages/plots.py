"""Plots of a run, its loss over the steps and its memory, and the canvas of all plots.

Matplotlib is imported only when a plot is drawn, and used without global state (no pyplot).
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.base import write_whole
from launcher.report.text import bytes_text, loss_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from launcher.plan.plan import Plan

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
