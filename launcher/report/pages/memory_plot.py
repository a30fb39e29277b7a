"""The picture of memory: what each stage is predicted to take, and the peak that was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from launcher.report.pages.plots import EVAL, IDLE, INK, TRAIN, canvas, save_figure
from launcher.report.text import bytes_text

if TYPE_CHECKING:
    from launcher.plan.plan import Plan


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
