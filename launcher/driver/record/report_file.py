"""Writes `report.html` into a run's folder; no report that fails ends a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.base.files import write_whole
from launcher.plan import Plan, timeline
from launcher.report.breakdown.step_breakdown import StepBreakdown
from launcher.report.pages.run_page import Reported, run_report
from launcher.report.pages.timeline import FILE, read_timeline
from launcher.report.summary import REPORT, Summary

_log = logging.getLogger(__name__)


def write_report(
    folder: Path,
    summary: Summary,
    plan: Plan,
    config: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]] = (),
    accounting: StepBreakdown | None = None,
    restarts: Sequence[str] = (),
) -> None:
    """Write the report of a run; what prevents it is said in one line.

    Args:
        folder: the run's folder, with its recorded steps.
        summary: its summary.
        plan: its plan.
        config: its settings, without secrets.
        records: its logged steps.
        accounting: where its time went, None where that is not known.
        restarts: what was said at each restart.
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
