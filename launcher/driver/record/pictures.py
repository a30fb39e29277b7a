"""The pictures of a run, drawn into its folder, and the files of it that trackers record."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.plan import Plan, timeline
from launcher.report.breakdown import step_breakdown
from launcher.report.pages.memory_plot import plot_memory
from launcher.report.pages.plots import plot_loss
from launcher.report.pages.timeline import FILE, read_timeline
from launcher.report.pages.timeline_plot import plot_timeline
from launcher.report.summary import REPORT

TIMELINE = Path("plots/timeline.png")

_log = logging.getLogger(__name__)

# What trackers record of a run's folder, by name.
ARTIFACTS = {
    "plan": "plan.json",
    "config": "config.yaml",
    "timeline": FILE,
    "accounting": step_breakdown.FILE,
    "report": REPORT,
    "profile": "profile",
}


def draw_timeline(plan: Plan, folder: Path, run_id: str) -> Path:
    """Draw the plan's predicted step into the run's folder; return the plot's path.

    Below it is the recorded step, the last one, if there is one.
    """
    path, recorded = folder / TIMELINE, read_timeline(folder / FILE)
    return plot_timeline(
        timeline(plan),
        path,
        run_id,
        plan.predicted_step_seconds,
        {step: recorded.spans(step) for step in recorded.steps},
    )


def draw_pictures(
    folder: Path, plan: Plan, records: Sequence[dict[str, Any]], peak: int | None
) -> dict[str, Path]:
    """Draw a run's pictures into its folder; return the paths by name of those that are drawn.

    What prevents one, such as a full disk, is said in a line, and ends no run.

    Args:
        folder: the run's folder.
        plan: its plan.
        records: its logged steps.
        peak: the measured peak of memory in bytes, None where it is unknown.
    """
    run_id, plots = folder.name, folder / "plots"
    drawn = {
        "timeline": functools.partial(draw_timeline, plan, folder, run_id),
        "memory": functools.partial(plot_memory, plan, peak, plots / "memory.png", run_id),
    }
    if records:
        drawn["loss"] = functools.partial(plot_loss, records, plots / "loss.png", run_id)
    pictures = {}
    for name, draw in drawn.items():
        try:
            pictures[f"plots/{name}"] = draw()
        except OSError as error:
            _log.warning(f"plots/{name}.png cannot be written: {error.strerror}")
    return pictures
