"""A plan and its outcome as plain tables for trackers. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.report.shardings import shardings_in_words
from launcher.report.summary import Summary
from launcher.report.text import ranges_text

if TYPE_CHECKING:
    from launcher.plan.plan import Plan


class Rows(NamedTuple):
    """The columns' names and the rows of a table."""

    columns: list[str]
    rows: list[list[Any]]


def plan_tables(plan: Plan) -> dict[str, Rows]:
    """Return a plan's tables by name, without empty ones.

    They hold the stages, their shardings, the runners-up and the measured layers.
    """
    stages = Rows(
        [
            "stage",
            "layers",
            "hosts",
            "devices",
            "data",
            "model",
            "parameters",
            "remat",
            "forward_seconds",
            "backward_seconds",
            "update_seconds",
            "memory_bytes",
        ],
        [
            [
                index,
                ranges_text(stage.layers),
                len(stage.hosts),
                len(stage.devices),
                *stage.logical_mesh,
                stage.num_parameters,
                stage.remat,
                stage.forward_seconds,
                stage.backward_seconds,
                stage.update_seconds,
                stage.memory_bytes,
            ]
            for index, stage in enumerate(plan.stages)
        ],
    )
    others = [list(dataclasses.astuple(other)) for other in plan.runners_up]
    profiled = [
        [ranges_text(found.layers), *list(dataclasses.astuple(found))[1:]]
        for found in plan.profiled
    ]
    tables = {
        "plan/stages": stages,
        "plan/shardings": Rows(["what"], [[words] for words in shardings_in_words(plan)]),
        "plan/runners_up": Rows(["plan", "predicted_step_seconds", "why"], others),
        "plan/profiled_layers": Rows(
            ["layers", "model", "rows", "forward_seconds", "backward_seconds", "failure"], profiled
        ),
    }
    return {name: table for name, table in tables.items() if table.rows}


def beside_measured(plan: Plan, summary: Summary, last: Mapping[str, Any]) -> Rows:
    """Return predicted and measured values and their relative difference, where both are known.

    Args:
        plan: the plan of the run.
        summary: the summary of the run.
        last: the last logged step, for the stages' seconds.
    """
    pairs = [
        ("step_seconds", summary.predicted_step_seconds, summary.step_seconds_median),
        ("peak_memory_bytes", summary.predicted_peak_memory_bytes, summary.peak_memory_bytes),
        ("bubble_fraction", summary.predicted_bubble_fraction, summary.bubble_fraction),
    ]
    for index, stage in enumerate(plan.stages):
        seconds = plan.num_micro_batches * (stage.forward_seconds + stage.backward_seconds)
        pairs.append(
            (f"stage_{index}_seconds", seconds, last.get(f"pipeline/stage_{index}_seconds"))
        )
    rows: list[list[Any]] = [
        [name, a, b, a / b - 1 if b else None]
        for name, a, b in pairs
        if a is not None and b is not None
    ]
    return Rows(["what", "predicted", "measured", "off"], rows)


def predicted_memory(plan: Plan) -> int:
    """Return the predicted peak of the fullest device, in bytes."""
    return max(stage.memory_bytes for stage in plan.stages)
