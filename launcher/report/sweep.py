"""A comparison of several runs: their different settings and their results.

It is read from `config.yaml` and `summary.json` in the runs' folders, and printed, or written as
`report.html`, `sweep.csv` and `plots/sweep.png`.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from rich.console import Console
from rich.text import Text

from launcher.base import DamagedError, read_json, write_whole
from launcher.base.reading import read_table
from launcher.report.console import table_of
from launcher.report.pages.page import Chart, Series, chart, page_from
from launcher.report.pages.plots import EVAL, INK, TRAIN, canvas, save_figure
from launcher.report.run_record import STOPPED_EARLY, ended_well
from launcher.report.summary import FILE_NAME, REPORT
from launcher.report.text import (
    bytes_text,
    flat,
    result_text,
    seconds_text,
    setting_text,
    shown_path,
)

if TYPE_CHECKING:
    from launcher.config.schema import Config

# Settings that name a run, and are no difference between runs.
IDENTITY = ("run.id", "run.dir", "wandb.name", "wandb.group")
UNSET = "-"
PREDICTED, MEASURED = "predicted step time (s)", "measured step time (s)"
TABLE, PICTURE = "sweep.csv", "plots/sweep.png"
_LARGEST = 1e300  # no result is larger
_MOST_PANELS = 6
_MOST_TICKS = 8
_IN_TABLE = (
    *("final_loss", "eval_loss", "step_seconds", "predicted_step_seconds", "samples_per_second"),
    *("peak_memory_bytes", "predicted_peak_memory_bytes"),
)


class Result(NamedTuple):
    """A field of the summary, the header of its column, and the function that picks the best value.

    `best` is None where no value is better than another.
    """

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


@dataclass(frozen=True)
class ComparedRun:
    """A run among others.

    Attributes:
        name: its name, without the sweep's.
        settings: those in which the runs differ, by dotted key.
        summary: its summary; empty where it has not ended.
    """

    name: str
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def is_done(self) -> bool:
        """Whether it ended well."""
        return ended_well(self.summary.get("exit_reason"))

    @property
    def seconds(self) -> float | None:
        """A step's seconds: measured, of a plan predicted."""
        measured = self.summary.get("step_seconds_median")
        return measured if measured is not None else self.summary.get("predicted_step_seconds")

    @property
    def ending(self) -> tuple[str, str]:
        """How it ended in a word or two, and the reason where that is longer."""
        reason = self.summary.get("exit_reason")
        if reason is None:
            return "not finished", f"there is no whole {FILE_NAME}"
        if reason.startswith(f"{STOPPED_EARLY}:"):
            return STOPPED_EARLY, ""
        return ("failed", reason) if " " in reason else (reason, "")


def _compared(folders: Sequence[Path]) -> list[ComparedRun]:
    """Read runs; `<sweep id>-`, where all are of one sweep, is not part of their names."""
    settings = [flat(read_table(folder / "config.yaml")) for folder in folders]
    known = dict.fromkeys(key for one in settings for key in one if key not in IDENTITY)
    begun = [one for one in settings if one]  # a trial has settings once it begins
    differing = [
        key
        for key in known
        if any(one.get(key, UNSET) != begun[0].get(key, UNSET) for one in begun)
    ]
    prefix = _common_prefix(folders)
    return [
        ComparedRun(
            folder.name.removeprefix(prefix),
            {key: one.get(key) if one else UNSET for key in differing},
            read_summary(folder),
        )
        for folder, one in zip(folders, settings, strict=True)
    ]


def _common_prefix(folders: Sequence[Path]) -> str:
    """Return `<sweep id>-` where these are runs `<sweep id>-<n>` of one sweep, else ""."""
    prefixes = {(folder.absolute().parent, folder.name.rpartition("-")[0]) for folder in folders}
    prefix = folders[0].name.rpartition("-")[0] if folders else ""
    return f"{prefix}-" if prefix and len(prefixes) == 1 and len(folders) > 1 else ""


def is_done(run_dir: Path) -> bool:
    """Return whether a run ended successfully."""
    return ended_well(read_summary(run_dir).get("exit_reason"))


def print_comparison(
    console: Console, run_dirs: Sequence[str | os.PathLike[str]], jobs: Sequence[str] | None = None
) -> None:
    """Print a row a run: its name, the settings in which the runs differ, its results, its end.

    Runs that were only planned are compared by their predictions. The best of each result among
    the successful runs is marked with `*`. The errors of the others are printed below. A run
    without a summary is shown as not finished.

    Args:
        console: the console to print to.
        run_dirs: the runs' folders.
        jobs: the batch job of each run and its state, where there are jobs.
    """
    folders = [Path(run_dir) for run_dir in run_dirs]
    runs = _compared(folders)
    if prefix := _common_prefix(folders):
        console.print(f"runs {shown_path(folders[0].parent / prefix)}*", soft_wrap=True)
    planned = {run.summary["exit_reason"] for run in runs if run.summary} == {"planned"}
    endings = [(UNSET, "") if jobs and not run.summary else run.ending for run in runs]
    keys = list(runs[0].settings)
    columns: list[tuple[str, Sequence[str | Text]]] = [
        ("run", [run.name for run in runs]),
        *(
            (name, [setting_text(run.settings[key]) for run in runs])
            for key, name in zip(keys, short_names(keys), strict=True)
        ),
        *(
            (result.header, _result_cells(result, runs))
            for result in (PLAN_RESULTS if planned else RESULTS)
        ),
        *([] if jobs is None else [("job", jobs)]),
        (
            "ended",
            [
                Text(ending, style="" if run.is_done else "bold red")
                for run, (ending, _) in zip(runs, endings, strict=True)
            ],
        ),
    ]
    headers, cells = zip(*columns, strict=True)
    console.print(table_of(headers, zip(*cells, strict=True), ("run", "job", "ended")))
    for run, (_, reason) in zip(runs, endings, strict=True):
        if reason:
            console.print(f"{run.name}: {reason}", soft_wrap=True)


def _result_cells(result: Result, runs: Sequence[ComparedRun]) -> list[Text]:
    """Return one result of every run as text, with the best one marked."""
    values = [run.summary.get(result.field) for run in runs]
    done = [v for v, run in zip(values, runs, strict=True) if run.is_done and v is not None]
    best = result.best(done) if result.best and len(set(done)) > 1 else None
    cells = []
    for value, run in zip(values, runs, strict=True):
        is_best = best is not None and value == best and run.is_done
        mark, style = ("*", "bold green") if is_best else ("", "")
        cells.append(Text(mark + result_text(value, result.field), style=style))
    return cells


def short_names(keys: Sequence[str]) -> list[str]:
    """Return dotted keys without their sections, unless two would then be the same."""
    last = [key.rpartition(".")[2] for key in keys]
    return [name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)]


def read_summary(folder: Path) -> dict[str, Any]:
    """Return a run's summary; nothing where there is none, or it is damaged."""
    try:
        summary = read_json(folder / FILE_NAME)
    except (OSError, DamagedError):
        return {}
    if not isinstance(summary, dict) or not isinstance(summary.get("exit_reason"), str):
        return {}
    results = [summary.get(result.field) for result in (*RESULTS, *PLAN_RESULTS)]
    return summary if all(map(_is_result, results)) else {}


def _is_result(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) < _LARGEST)


def report_sweep(
    console: Console, folder: Path, run_dirs: Sequence[str | os.PathLike[str]]
) -> None:
    """Write `report.html` of a sweep into its folder, and say where it is or why it is not.

    Args:
        console: the console to print to.
        folder: the sweep's folder.
        run_dirs: the runs' folders.
    """
    runs = _compared([Path(run_dir) for run_dir in run_dirs])
    done = [run for run in runs if run.is_done and run.seconds is not None]
    best = min(done, key=lambda run: run.seconds or 0.0, default=None)
    keys = list(runs[0].settings) if runs else []
    content = {
        "title": folder.name,
        "keys": keys,
        "runs": runs,
        "best": best,
        "done": len(done),
        "charts": [one for key in keys for one in _charts(key, runs, best)],
    }
    path = folder / REPORT
    try:
        write_whole(path, page_from("sweep.html.jinja", content).encode())
    except OSError as error:
        console.print(f"{path} cannot be written: {error.strerror}", soft_wrap=True)
    else:
        console.print(f"report  {shown_path(path)}", soft_wrap=True)


def _charts(key: str, runs: Sequence[ComparedRun], best: ComparedRun | None) -> Iterator[Chart]:
    """Yield step time and memory against one setting, whose values stand in their order."""
    values = {setting_text(run.settings[key]): run.settings[key] for run in runs if run.summary}
    labels = sorted(values, key=lambda text: _order(values[text]))

    def series(field: str, name: str, css: str, best: float | None = None) -> Series:
        points = [
            (float(labels.index(setting_text(run.settings[key]))), run.summary[field])
            for run in runs
            if run.is_done and run.summary.get(field) is not None
        ]
        return Series(name, css, points, False, best)

    fastest = None if best is None else best.summary.get("step_seconds_median")
    times = [
        series("predicted_step_seconds", "predicted", "hollow"),
        series("step_seconds_median", "measured", "first", fastest),
    ]
    memory = [
        series("predicted_peak_memory_bytes", "predicted", "hollow"),
        series("peak_memory_bytes", "measured", "first"),
    ]
    for title, both, shown in (("step time", times, seconds_text), ("memory", memory, bytes_text)):
        if drawn := chart(title, key, both, shown, labels, from_zero=True):
            yield drawn


def _order(value: Any) -> tuple[int, float, str]:
    """Return a key that puts numbers first, in their order, then words."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0, float(value), ""
    return 1, 0.0, setting_text(value)


class Row(NamedTuple):
    """A point of a sweep: its number, its run's id, what is swept, its state and objective."""

    number: int
    run: str
    swept: Sequence[str]
    state: str
    value: float | None


def objective_of(config: Config) -> str:
    """Return `sweep.objective`, or the one that suits the task."""
    if config.sweep.objective is not None:
        return config.sweep.objective
    if config.task == "plan":
        return "predicted_step_seconds"
    return "eval_loss" if config.train.eval_every else "final_loss"


def result_of(run_dir: Path, name: str) -> float | None:
    """Return a result from a run's summary; None where there is none."""
    return _result(read_summary(run_dir), name)


def _result(summary: Mapping[str, Any], name: str) -> float | None:
    value = summary.get("step_seconds_median" if name == "step_seconds" else name)
    return value if type(value) in (int, float) else None


def write_results(folder: Path, rows: Sequence[Row], objective: str) -> None:
    """Write the table and the picture of a sweep into its folder.

    Args:
        folder: the sweep's folder, with the runs' folders in it.
        rows: its points.
        objective: the name of their objective.
    """
    swept = [dict(text.lstrip("+").partition("=")[::2] for text in row.swept) for row in rows]
    keys = list(dict.fromkeys(key for one in swept for key in one))
    summaries = [read_summary(folder / row.run) for row in rows]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["point", "run", "state", *keys, "objective", *_IN_TABLE])
    for row, settings, summary in zip(rows, swept, summaries, strict=True):
        results = [_result(summary, name) for name in _IN_TABLE]
        cells = [settings.get(key) for key in keys]
        table.writerow([row.number, row.run, row.state, *cells, row.value, *results])
    write_whole(folder / TABLE, text.getvalue())
    drawn: dict[str, list[float | None]] = {
        PREDICTED: [_result(one, "predicted_step_seconds") for one in summaries],
        MEASURED: [_result(one, "step_seconds") for one in summaries],
    }
    if not objective.endswith("step_seconds"):
        drawn[objective] = [row.value for row in rows]
    _draw(folder / PICTURE, keys, swept, drawn)


def _draw(
    path: Path,
    keys: Sequence[str],
    values: Sequence[Mapping[str, str]],
    results: Mapping[str, Sequence[float | None]],
) -> None:
    """Draw the results of the points against each swept setting, if there are two or more.

    Args:
        path: the picture.
        keys: the swept settings.
        values: what each point sets.
        results: the result of each point, by name. Step times, predicted and measured, share axes.
    """
    shown = [name for name, one in results.items() if sum(v is not None for v in one) > 1]
    times = [name for name in shown if name in (PREDICTED, MEASURED)]
    others = [[name] for name in shown if name not in times]
    panels = [(key, names) for key in keys for names in (*others, times) if names][:_MOST_PANELS]
    if not panels:
        return
    figure, axes = canvas(8.0, 2.8 * len(panels), [1.0] * len(panels))
    for place, (key, names) in zip(axes, panels, strict=True):
        _panel(place, [value.get(key) for value in values], {name: results[name] for name in names})
        place.set_xlabel(key)
        place.set_ylabel(names[0] if len(names) == 1 else "step time (s)")
        place.margins(y=0.15)
    save_figure(figure, path)


def _panel(
    axes: Any, settings: Sequence[str | None], results: Mapping[str, Sequence[float | None]]
) -> None:
    numbers = [_setting_number(text) for text in settings]
    is_scale = all(number is not None for number in numbers)
    words = list(dict.fromkeys(map(str, settings)))
    places = numbers if is_scale else [words.index(str(text)) for text in settings]
    for name, values in results.items():
        known = [(x, y) for x, y in zip(places, values, strict=True) if y is not None]
        colour = {"color": TRAIN} if name != MEASURED else {"color": EVAL, "facecolors": "none"}
        axes.scatter(*zip(*known, strict=True), s=42, label=name, **colour)
    if not is_scale:
        axes.set_xticks(range(len(words)), words)
    elif all(x and x > 0 for x in numbers) and max(numbers) >= 8 * min(numbers):  # type: ignore[type-var, operator]
        axes.set_xscale("log")
        if len(set(numbers)) <= _MOST_TICKS:
            axes.set_xticks(numbers, settings)
            axes.minorticks_off()
    if len(results) > 1:
        axes.legend(frameon=False, labelcolor=INK)
    axes.grid(color="#E6E6E6", linewidth=0.8)


def _setting_number(text: str | None) -> float | None:
    value = yaml.safe_load(text) if text and len(text) < 40 else None
    if isinstance(value, str):  # YAML takes 1e-3 for text
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) else None
