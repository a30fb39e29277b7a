"""Pictures and report of a run, written into its folder, and the files that trackers record."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.base import write_whole
from launcher.plan import Plan, timeline
from launcher.report import breakdown as step_breakdown
from launcher.report.breakdown import StepBreakdown
from launcher.report.pages.plots import plot_loss, plot_memory, plot_timeline
from launcher.report.pages.run_page import Reported, run_report
from launcher.report.pages.timeline import FILE, read_timeline
from launcher.report.summary import REPORT, Summary

TIMELINE = Path("plots/timeline.png")

_log = logging.getLogger(__name__)

# Files of a run's folder that trackers record, by name.
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

    A picture that cannot be written, for instance on a full disk, costs a warning.

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


def write_report(
    folder: Path,
    summary: Summary,
    plan: Plan,
    config: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]] = (),
    accounting: StepBreakdown | None = None,
    restarts: Sequence[str] = (),
) -> None:
    """Write `report.html` of a run; an error is a warning, and ends no run.

    Args:
        folder: the run's folder, with its recorded steps.
        summary: its summary.
        plan: its plan.
        config: its settings, without secrets.
        records: its logged steps.
        accounting: the breakdown of its time, None where that is not known.
        restarts: the message of each restart.
    """
    try:
        recorded = read_timeline(folder / FILE)
        steps = {step: recorded.spans(step) for step in recorded.steps}
        found = Reported(
            summary, plan, timeline(plan), config, records, steps, accounting, restarts
        )
        write_whole(folder / REPORT, run_report(found).encode())
    except Exception as error:
        _log.warning(f"{REPORT} cannot be written: {error}")
