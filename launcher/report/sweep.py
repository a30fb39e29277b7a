"""Several runs side by side: what was set differently, and what came of it.

Reads the run folders' `config.yaml` and `summary.json`; the sweep's front door prints the table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.table import Table
from rich.text import Text

from launcher.report.console import plain_table
from launcher.report.summary import FILE_NAME, shown_path
from launcher.report.text import bytes_text, loss_text, percent_text, seconds_text

# They say which run it is, and not what is different about it.
IDENTITY = ("run.id", "run.dir", "wandb.name", "wandb.group")
UNSET = "-"


class Result(NamedTuple):
    """A field of the summary, its column, and which of several values is the best (None: none)."""

    field: str
    header: str
    best: Callable[[Sequence[float]], float] | None


RESULTS = (
    Result("final_loss", "loss", min),
    Result("eval_loss", "eval", min),
    Result("step_seconds_median", "step", min),
    Result("predicted_step_seconds", "predicted", None),
    Result("samples_per_second", "samples/s", max),
)

PLAN_RESULTS = (  # of runs that were planned and not run
    Result("predicted_step_seconds", "predicted", min),
    Result("predicted_samples_per_second", "samples/s", max),
    Result("predicted_bubble_fraction", "bubble", min),
    Result("predicted_peak_memory_bytes", "memory", min),
)


def is_done(run_dir: Path) -> bool:
    """Whether a run has come to its end as it should."""
    return _is_done(_summary(run_dir))


def comparison_table(
    run_dirs: Sequence[str | os.PathLike[str]], jobs: Sequence[str] | None = None
) -> Table:
    """A row a run: its name, the settings in which the runs differ, its results, how it ended.

    `jobs` says of each which job of a batch system it is and how far that is.

    Runs that were only planned are compared by their predictions. The best of each result among
    the runs that are done is marked with `*`. What went wrong with the others stands below. A run
    without a summary is shown as not finished.
    """
    folders = [Path(run_dir) for run_dir in run_dirs]
    settings = [_settings(folder) for folder in folders]
    summaries = [_summary(folder) for folder in folders]
    prefix = _common_prefix(folders)
    table = plain_table()
    if prefix:
        table.title = Text(f"runs {shown_path(folders[0].parent / prefix)}*")
        table.title_justify = "left"
    keys = _differing(settings)
    planned = {summary.get("exit_reason") for summary in summaries if summary} == {"planned"}
    columns = PLAN_RESULTS if planned else RESULTS
    results = [_result_cells(result, summaries) for result in columns]
    table.add_column("run", no_wrap=True)
    for name in short_names(keys):
        table.add_column(name, justify="right", overflow="fold")
    for result in columns:
        table.add_column(result.header, justify="right", no_wrap=True)
    if jobs is not None:
        table.add_column("job", no_wrap=True)
    table.add_column("ended", no_wrap=True)
    reasons = []
    for row, (folder, summary) in enumerate(zip(folders, summaries, strict=True)):
        name = folder.name.removeprefix(prefix)
        ending, reason = _ending(summary) if summary or jobs is None else (UNSET, "")
        if reason:
            reasons.append(f"{name}: {reason}")
        table.add_row(
            name,
            *(_shown(settings[row].get(key)) for key in keys),
            *(cells[row] for cells in results),
            *([] if jobs is None else [Text(jobs[row])]),
            Text(ending, style="" if _is_done(summary) else "bold red"),
        )
    if reasons:
        table.caption = Text("\n".join(reasons))
        table.caption_justify = "left"
    return table


def _common_prefix(folders: Sequence[Path]) -> str:
    """`<sweep id>-` where these are the runs of one sweep, `<sweep id>-<n>`; else empty."""
    prefixes = {(folder.absolute().parent, folder.name.rpartition("-")[0]) for folder in folders}
    prefix = folders[0].name.rpartition("-")[0]
    return f"{prefix}-" if prefix and len(prefixes) == 1 and len(folders) > 1 else ""


def _result_cells(result: Result, summaries: Sequence[Mapping[str, Any]]) -> list[Text]:
    """One result of every run, as text; the best one marked."""
    done = [s[result.field] for s in summaries if _is_done(s) and s.get(result.field) is not None]
    best = result.best(done) if result.best and len(set(done)) > 1 else None
    cells = []
    for summary in summaries:
        value = summary.get(result.field)
        is_best = best is not None and value == best and _is_done(summary)
        mark, style = ("*", "bold green") if is_best else ("", "")
        cells.append(Text(mark + _number(result.field, value), style=style))
    return cells


def _number(name: str, value: float | None) -> str:
    if value is None:
        return UNSET
    if name.endswith("_loss"):
        return loss_text(value)
    if name.endswith("_bytes"):
        return bytes_text(value)
    if name.endswith("_fraction"):
        return percent_text(value)
    return f"{value:,.1f}" if name.endswith("samples_per_second") else seconds_text(value)


def _ending(summary: Mapping[str, Any]) -> tuple[str, str]:
    """How a run ended in a word or two, and why, where that needs more than a word."""
    if not summary:
        return "not finished", f"it wrote no {FILE_NAME}"
    reason = summary["exit_reason"]
    return ("failed", reason) if " " in reason else (reason, "")


def _is_done(summary: Mapping[str, Any]) -> bool:
    return summary.get("exit_reason") in ("done", "planned")


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys that do not have the same value in every run, in the order of the settings."""
    keys = dict.fromkeys(key for one in settings for key in one if key not in IDENTITY)
    return [
        key
        for key in keys
        if any(one.get(key, UNSET) != settings[0].get(key, UNSET) for one in settings)
    ]


def short_names(keys: Sequence[str]) -> list[str]:
    """Dotted keys without their sections, as long as that leaves them apart from each other."""
    last = [key.rpartition(".")[2] for key in keys]
    return [name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)]


def _settings(folder: Path) -> dict[str, Any]:
    """The run's settings by dotted key; none where the run did not come to write them."""
    try:
        tree = yaml.safe_load((folder / "config.yaml").read_text())
    except (OSError, yaml.YAMLError):
        return {}
    return _flat(tree) if isinstance(tree, dict) else {}


def _summary(folder: Path) -> dict[str, Any]:
    try:
        summary = json.loads((folder / FILE_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) and "exit_reason" in summary else {}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        flat |= _flat(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return flat


def _shown(value: Any) -> str:
    return UNSET if value is None else str(value)
