"""Report of a sweep: all points, with step time and memory against each swept setting. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.report.pages.page import Chart, Series, chart, page_from
from launcher.report.run_record import ended_well
from launcher.report.text import bytes_text, loss_text, seconds_text

_MEASURED, _PREDICTED = "first", "hollow"


@dataclass(frozen=True)
class SweptRun:
    """A run of a sweep.

    Attributes:
        name: its name in the sweep.
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


def sweep_report(name: str, points: Sequence[SweptRun]) -> str:
    """Return the page that compares the runs of a sweep; the fastest step is marked."""
    done = [point for point in points if point.is_done and point.seconds is not None]
    best = min(done, key=lambda point: point.seconds or 0.0, default=None)
    keys = list(dict.fromkeys(key for point in points for key in point.settings))
    content = {
        "title": name,
        "keys": keys,
        "rows": [_row(point, keys, point is best) for point in points],
        "best": best.name if best else "",
        "done": len(done),
        "charts": [one for key in keys for one in _charts(key, points, best)],
    }
    return page_from("sweep.html.jinja", content)


def _row(point: SweptRun, keys: Sequence[str], is_best: bool) -> dict[str, Any]:
    found = point.summary
    return {
        "name": point.name,
        "settings": [_text(point.settings.get(key)) for key in keys],
        "cells": [
            loss_text(found.get("final_loss")),
            loss_text(found.get("eval_loss")),
            seconds_text(found.get("step_seconds_median")),
            seconds_text(found.get("predicted_step_seconds")),
            bytes_text(found.get("peak_memory_bytes")),
            bytes_text(found.get("predicted_peak_memory_bytes")),
        ],
        "ending": found.get("exit_reason", "not finished"),
        "is_done": point.is_done,
        "is_best": is_best,
    }


def _charts(key: str, points: Sequence[SweptRun], best: SweptRun | None) -> list[Chart]:
    """Return step time and memory against one setting, whose values stand in their order."""
    values = {_text(point.settings.get(key)): point.settings.get(key) for point in points}
    labels = sorted(values, key=lambda text: _order(values[text]))

    def series(field: str, name: str, css: str) -> Series:
        found = [
            (float(labels.index(_text(point.settings.get(key)))), point.summary.get(field))
            for point in points
            if point.is_done
        ]
        known = [(x, float(y)) for x, y in found if y is not None]
        at = None if best is None else best.summary.get(field)
        is_best = at is not None and css == _MEASURED and field == "step_seconds_median"
        return Series(name, css, known, False, float(at) if is_best and at is not None else None)

    def drawn(
        title: str, measured: str, predicted: str, shown: Any, binary: bool = False
    ) -> Chart | None:
        both = [series(predicted, "predicted", _PREDICTED), series(measured, "measured", _MEASURED)]
        return chart(title, key, both, shown, labels, from_zero=True, binary=binary)

    found = [
        drawn("step time", "step_seconds_median", "predicted_step_seconds", seconds_text),
        drawn("memory", "peak_memory_bytes", "predicted_peak_memory_bytes", bytes_text, True),
    ]
    return [one for one in found if one]


def _order(value: Any) -> tuple[int, float, str]:
    """Return a key that puts numbers first, in their order, then words."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0, float(value), ""
    return 1, 0.0, _text(value)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
