"""The shardings of a plan in words: one line for each way in which arrays are sharded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.report.text import ranges_text

if TYPE_CHECKING:
    from launcher.plan import Plan, StagePlan

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
