"""A plan, and what came of it, as plain tables for whoever records a run. Pure.

`launcher.train` hands them to a tracker; the same figures stand on the console (`plan_table`,
`summary`) and in the run folder.
"""

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
    """A table: the names of its columns, and its rows."""

    columns: list[str]
    rows: list[list[Any]]


def plan_tables(plan: Plan) -> dict[str, Rows]:
    """The stages, what they cut, the runners-up, and the measured layers; those that there are."""
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
    """What was predicted beside what was measured, and how far it is off, where both are known.

    Args:
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
    """The predicted peak that a run measures: of a device; where devices share this machine's
    memory, of the host that holds most."""
    if plan.cluster.get("memory_bytes") is not None:
        return max(stage.memory_bytes for stage in plan.stages)
    each = plan.cluster["devices_per_host"]
    of_mesh = {stage.devices: stage.memory_bytes for stage in plan.stages}  # of the whole mesh
    total: dict[int, int] = {}
    for devices, memory in of_mesh.items():
        for device in devices:
            total[device // each] = total.get(device // each, 0) + memory
    return max(total.values())
