"""The accounting for people and trackers: tables, lines on the console, fields of the summary."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from launcher.report.breakdown.accounting import Accounting
from launcher.report.breakdown.goodput import PHASES
from launcher.report.console import plain_table
from launcher.report.plan_record import Rows
from launcher.report.text import seconds_text

_SMALL = 0.01  # of the step: parts that are shorter have no line on the console


def accounting_tables(accounting: Accounting) -> dict[str, Rows]:
    """Return the parts of a step and its stages, predicted and measured, for trackers.

    Without a recorded step there are none.
    """
    parts = [
        [p.name, p.predicted_seconds, p.measured_seconds, p.measured_seconds - p.predicted_seconds]
        for p in accounting.parts
    ]
    if not parts:
        return {}
    predicted, measured = accounting.predicted_step_seconds, accounting.measured_step_seconds or 0.0
    parts.append(["step", predicted, measured, measured - predicted])
    names = ("forward", "backward", "update", "idle", "others", "step")
    columns = ["stage", *(f"{side}_{name}_seconds" for name in names for side in _SIDES)]
    stages = [
        [
            stage.measured.stage,
            *(
                getattr(getattr(stage, side), f"{name}_seconds")
                for name in names
                for side in _SIDES
            ),
        ]
        for stage in accounting.stages
    ]
    return {
        "accounting": Rows(["part", *(f"{side}_seconds" for side in _SIDES), "more"], parts),
        "measured_stages": Rows(columns, stages),
    }


_SIDES = ("predicted", "measured")


def in_summary(accounting: Accounting) -> dict[str, Any]:
    """Return the fields of a summary that follow from the accounting."""
    good = accounting.goodput
    return {
        "mfu_with_remat": accounting.mfu_with_remat,
        "goodput": good.goodput,
        "goodput_seconds": {phase: good.seconds(phase) for phase in PHASES},
        "cost": good.cost,
        "accounting": {p.name: p.measured_seconds - p.predicted_seconds for p in accounting.parts},
        "differs": accounting.sentence,
    }


def print_accounting(console: Console, accounting: Accounting) -> None:
    """Print where a step's time went, and why, if it is not what was predicted.

    Parts that are no share of the step have no line, nor has a difference of clocks that is within
    their uncertainty; without a recorded step nothing is printed.
    """
    if not accounting.parts:
        return
    step = max(accounting.predicted_step_seconds, accounting.measured_step_seconds or 0.0)
    table = plain_table()
    for name in (f"step {accounting.step}", "predicted", "measured"):
        table.add_column(name, justify="right" if table.columns else "left")
    for part in accounting.parts:
        both = part.predicted_seconds, part.measured_seconds
        if max(map(abs, both)) >= _SMALL * step:
            table.add_row(part.name, *(seconds_text(s) if s else "-" for s in both))
    console.print()
    console.print(table)
    if accounting.sentence:
        console.print(accounting.sentence, soft_wrap=True)
    skew, uncertainty = accounting.clock_skew_seconds, accounting.clock_uncertainty_seconds
    if skew > uncertainty:
        console.print(
            f"The processes' clocks were {seconds_text(skew)} apart, which is corrected for; times "
            f"of two processes may be off by {seconds_text(uncertainty)}.",
            soft_wrap=True,
        )
