"""Results of a sweep, as a table and as a picture: `sweep.csv`, `plots/sweep.png`."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from launcher.base import write_whole
from launcher.config.schema import Config
from launcher.report.pages.plots import EVAL, INK, TRAIN, canvas, save_figure
from launcher.report.sweep import read_summary

PREDICTED, MEASURED = "predicted step time (s)", "measured step time (s)"
TABLE, PICTURE = "sweep.csv", "plots/sweep.png"
_MOST_PANELS = 6
_MOST_TICKS = 8
_RESULTS = (
    *("final_loss", "eval_loss", "step_seconds", "predicted_step_seconds", "samples_per_second"),
    *("peak_memory_bytes", "predicted_peak_memory_bytes"),
)


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
    swept = [dict(text.partition("=")[::2] for text in row.swept) for row in rows]
    keys = list(dict.fromkeys(key.lstrip("+") for one in swept for key in one))
    values = [{key.lstrip("+"): text for key, text in one.items()} for one in swept]
    found = [read_summary(folder / row.run) for row in rows]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["point", "run", "state", *keys, "objective", *_RESULTS])
    for row, value, summary in zip(rows, values, found, strict=True):
        results = [_result(summary, name) for name in _RESULTS]
        settings = [value.get(key) for key in keys]
        table.writerow([row.number, row.run, row.state, *settings, row.value, *results])
    write_whole(folder / TABLE, text.getvalue())
    drawn: dict[str, list[float | None]] = {
        PREDICTED: [_result(one, "predicted_step_seconds") for one in found],
        MEASURED: [_result(one, "step_seconds") for one in found],
    }
    if not objective.endswith("step_seconds"):
        drawn[objective] = [row.value for row in rows]
    _draw(folder / PICTURE, keys, values, drawn)


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
    shown = [name for name, found in results.items() if sum(v is not None for v in found) > 1]
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
    numbers = [_number(text) for text in settings]
    is_scale = all(number is not None for number in numbers)
    words = list(dict.fromkeys(str(text) for text in settings))
    places = numbers if is_scale else [words.index(str(text)) for text in settings]
    colours = {MEASURED: EVAL}
    for name, values in results.items():
        known = [(x, y) for x, y in zip(places, values, strict=True) if y is not None]
        hollow = "none" if name == MEASURED else None
        axes.scatter(
            *zip(*known, strict=True),
            s=42,
            label=name,
            color=colours.get(name, TRAIN),
            facecolors=hollow,
        )
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


def _number(text: str | None) -> float | None:
    value = yaml.safe_load(text) if text and len(text) < 40 else None
    if isinstance(value, str):  # YAML takes 1e-3 for text
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) else None
