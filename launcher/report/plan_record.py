"""A plan and its results as plain tables for trackers, and its shardings in words. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.report.summary import Summary
from launcher.report.text import ranges_text

if TYPE_CHECKING:
    from launcher.plan import Plan, StagePlan


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


_NAMES = 3  # listed of each kind


def shardings_in_words(plan: Plan) -> list[str]:
    """Return one line for each distinct sharding, with its stages; none on single devices.

    For example `stages 0-1: 12 arrays cut along model: mlp.linear_fc1.kernel, …`.
    """
    of: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        for words in _stage_in_words(stage):
            of.setdefault(words, []).append(index)
    return [f"{_stages(stages)}: {words}" for words, stages in of.items()]


def _stage_in_words(stage: StagePlan) -> list[str]:
    groups: dict[str, list[str]] = {}
    for name, spec in stage.shardings.items():
        axes = sorted({axis for dim in spec for axis in _axes(dim)})
        groups.setdefault(" and ".join(axes), []).append(name)
    lines = []
    data, model = stage.logical_mesh
    if data > 1:
        lines.append(f"the batch cut in {data} along data")
    rows = [n for n in stage.shardings if _is_batch(n) and "model" in stage.shardings[n]]
    if rows:
        lines.append(f"each row of the batch cut in {model} along model: {_examples(rows)}")
    for along, names in groups.items():
        kept = [name for name in names if not _is_batch(name)]
        if along and kept:
            lines.append(f"{len(kept)} arrays cut along {along}: {_examples(kept)}")
    if model > 1 and not any("model" in along for along in groups):
        lines.append(f"nothing cut along model: {model} devices do the same")
    return lines


def _is_batch(name: str) -> bool:
    return name.partition(".")[0] == "1"


def _axes(dim: Any) -> tuple[str, ...]:
    return (dim,) if isinstance(dim, str) else tuple(dim or ())


def _examples(names: Sequence[str]) -> str:
    """Return the last parts of the names; those that differ only in numbers are listed once."""
    kinds = [re.sub(r"\d+", "*", re.sub(r"\.\d+$", "", name)) for name in names]  # of any row
    ends = list(dict.fromkeys(".".join(kind.split(".")[-2:]) for kind in kinds))
    listed = ", ".join(ends[:_NAMES])
    return listed if len(ends) <= _NAMES else f"{listed} and {len(ends) - _NAMES} more kinds"


def _stages(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {ranges_text(stages)}"
