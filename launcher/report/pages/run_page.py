"""The report of one run: `report.html` in its folder. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launcher.report.breakdown import PHASES, StepBreakdown
from launcher.report.pages.page import Chart, Series, chart, page_from, ticks
from launcher.report.pages.plots import measured_picture, predicted_picture
from launcher.report.plan_table import (
    advice_aim,
    alike,
    as_planned,
    beside_measured,
    gain_text,
    headline,
    improvements,
    plan_tables,
    predictions,
    uncertainty,
)
from launcher.report.run_record import ended_well
from launcher.report.summary import Summary, results
from launcher.report.text import flat, loss_text, seconds_text

if TYPE_CHECKING:
    from launcher.base import Span
    from launcher.plan import Advice, Plan
    from launcher.schedule import TimedTask

MOST_BOXES = 6000  # of a timeline; more would make the page slow
COMPILED = (
    ("plan/compiled_stages", "As compiled, the peak of a device"),
    ("plan/compiled_collectives", "Collectives in the compiled programs"),
    ("plan/compile_errors", "What does not compile"),
)
_SMALL = 0.002  # of the step: shorter parts of it are left out
_LEGEND = {  # the class and the name of each kind of box
    "forward": ("forward", "forward"),
    "backward": ("backward", "backward"),
    "backward_input": ("backward", "backward"),
    "backward_weight": ("weight", "backward, weights"),
    "forward_backward": ("both", "forward and backward"),
    "gradient sum": ("sum", "gradient sums"),
    "update": ("update", "update"),
}
# The curves: their metrics, names and colours, what writes a value, and whether they begin at 0.
_CURVES = (
    (
        "loss",
        [("train/loss", "train", "first"), ("eval/loss", "validation", "second")],
        loss_text,
        False,
    ),
    (
        "step time",
        [("perf/step_seconds", "step", "first"), ("data/wait_seconds", "wait for data", "second")],
        seconds_text,
        True,
    ),
    ("gradient norm", [("train/grad_norm", "gradient norm", "third")], loss_text, False),
    ("learning rate", [("train/learning_rate", "learning rate", "third")], "{:.2g}".format, True),
)


@dataclass(frozen=True)
class Reported:
    """Content of the report of a run.

    Attributes:
        summary: the run's summary.
        plan: its plan.
        timeline: the plan's predicted step.
        config: its settings, without secrets.
        records: its logged steps.
        recorded: the spans of each recorded step.
        accounting: the breakdown of its time, None where that is not known.
        restarts: the message of each restart.
    """

    summary: Summary
    plan: Plan
    timeline: Sequence[TimedTask]
    config: Mapping[str, Any] = field(default_factory=dict)
    records: Sequence[Mapping[str, Any]] = ()
    recorded: Mapping[int, Sequence[Span]] = field(default_factory=dict)
    accounting: StepBreakdown | None = None
    restarts: Sequence[str] = ()


def run_report(found: Reported) -> str:
    """Return the page that reports a run."""
    pictures = []
    if found.timeline:
        step = found.plan.predicted_step_seconds
        pictures.append(predicted_picture(found.timeline, "predicted", step))
    for step in sorted(found.recorded)[-1:]:
        if picture := measured_picture(found.recorded[step], f"measured, step {step}"):
            pictures.append(picture)
    total = max((picture.total for picture in pictures), default=0.0)
    kinds = {box.kind for picture in pictures for box in picture.boxes}
    accounting = found.accounting or StepBreakdown(0.0)
    good = accounting.goodput
    content = {
        "summary": found.summary,
        "title": found.summary.run_id,
        "is_done": ended_well(found.summary.exit_reason),
        "results": [*results(found.summary), *_prediction(found.summary)],
        "headline": headline(found.plan),
        "predictions": predictions(found.plan),
        "promises": list(_promises(found)),
        "sentence": accounting.sentence,
        "plan_tables": plan_tables(found.plan),
        "compiled": COMPILED,
        "alike": alike(found.plan) if found.plan.alike else "",
        "advice": list(_advice(found.plan)),
        "gain_text": functools.partial(gain_text, found.plan),
        "uncertainty": uncertainty(found.plan, found.plan.advice),
        "aim": advice_aim(found.plan) if found.plan.advice else "",
        "as_planned": as_planned(found.plan),
        "pictures": pictures if total > 0 else [],
        "total": total,
        "most_boxes": MOST_BOXES,
        "marks": [t for t in ticks(0.0, total, 8) if t <= total],
        "looks": _LEGEND,
        "legend": list(dict.fromkeys(_LEGEND[kind] for kind in _LEGEND if kind in kinds)),
        "charts": list(_charts(found.records)),
        "accounted_step": accounting.step,
        "parts": list(_parts(accounting)),
        "phases": [(p, s) for p in PHASES if (s := good.seconds(p))],
        "goodput": good,
        "restarts": found.restarts,
        "settings": flat(found.config),
    }
    return page_from("run.html.jinja", content)


def _advice(plan: Plan) -> Iterator[tuple[Advice, str, float]]:
    """Yield each piece of advice, improvements first, with the class and length of its bar.

    The longest bar is 1; gains and losses share the scale.
    """
    best = improvements(plan)
    every = [*best, *(one for one in plan.advice if one not in best)]
    most = max((abs(one.gain or 0.0) for one in every), default=0.0) or 1.0
    for one in every:
        yield one, "predicted" if one not in best else "measured", abs(one.gain or 0.0) / most


def _prediction(summary: Summary) -> Iterator[tuple[str, str, str]]:
    """Yield the step time as `results` does, where only the predicted one is known."""
    if summary.step_seconds_median is None and summary.predicted_step_seconds is not None:
        yield "step time", seconds_text(summary.predicted_step_seconds), "predicted"


def _promises(found: Reported) -> Iterator[tuple[str, float, float, float | None, float]]:
    """Yield what was predicted and measured: name, both, by how much they differ, longest bar."""
    last = found.records[-1] if found.records else {}
    for name, predicted, measured, _ in beside_measured(found.plan, found.summary, last).rows:
        off = measured / predicted - 1 if predicted else None
        yield name, predicted, measured, off, max(predicted, measured) or 1.0


def _parts(accounting: StepBreakdown) -> Iterator[tuple[str, float, float, float | None, float]]:
    """Yield the parts of the step as `_promises`; the difference is a share of the step."""
    parts, step = accounting.large_parts(_SMALL), accounting.longer_step_seconds
    most = max((s for p in parts for s in (p.predicted_seconds, p.measured_seconds)), default=0)
    for part in parts:
        both = part.predicted_seconds, part.measured_seconds
        yield (
            f"{part.name}_seconds",
            *both,
            (both[1] - both[0]) / step if step else None,
            most or 1.0,
        )


def _charts(records: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    for title, metrics, shown, from_zero in _CURVES:
        series = [
            Series(name, css, [(r["step"], r[key]) for r in records if r.get(key) is not None])
            for key, name, css in metrics
        ]
        if drawn := chart(title, "step", series, shown, from_zero=from_zero):
            yield drawn
