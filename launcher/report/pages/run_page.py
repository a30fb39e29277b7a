"""The report of one run: `report.html` in its folder. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.report.breakdown import PHASES, StepBreakdown
from launcher.report.pages.page import Chart, chart, legend, metric, page_from, together
from launcher.report.pages.plots import measured_picture, predicted_picture
from launcher.report.plan_table import beside_measured, plan_tables
from launcher.report.run_record import ended_well
from launcher.report.summary import Summary
from launcher.report.text import (
    bytes_text,
    clock_text,
    count_text,
    flat,
    loss_text,
    percent_text,
    rate_text,
    seconds_text,
)

if TYPE_CHECKING:
    from launcher.base import Span
    from launcher.plan.plan import Plan
    from launcher.schedule import TimedTask

_SMALL = 0.002  # of the step: parts of it that are shorter are not drawn


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


class Card(NamedTuple):
    """A figure that stands out: its name, its value, and a line below it."""

    name: str
    value: str
    note: str = ""


class Both(NamedTuple):
    """A row with a predicted and a measured value, and their shares of the longest bar."""

    name: str
    predicted: str
    measured: str
    off: str = ""
    predicted_share: float = 0.0
    measured_share: float = 0.0


class Share(NamedTuple):
    """A phase of the run's wall time."""

    name: str
    seconds: str
    percent: float


def run_report(found: Reported) -> str:
    """Return the page that reports a run."""
    pictures = []
    if found.timeline:
        step = found.plan.predicted_step_seconds
        pictures.append(predicted_picture(found.timeline, "predicted", step))
    for step in sorted(found.recorded)[-1:]:
        if picture := measured_picture(found.recorded[step], f"measured, step {step}"):
            pictures.append(picture)
    lanes, marks = together(pictures)
    summary = found.summary
    content = {
        "title": summary.run_id,
        "summary": summary,
        "is_done": ended_well(summary.exit_reason),
        "cards": list(_cards(summary)),
        "promises": list(_promises(found)),
        "sentence": found.accounting.sentence if found.accounting else "",
        "plan_words": _plan_words(found.plan),
        "plan_tables": plan_tables(found.plan),
        "stages": list(_stages(found.plan)),
        "lanes": lanes,
        "legend": legend(pictures),
        "marks": marks,
        "charts": list(_charts(found.records)),
        "parts": list(_parts(found.accounting)),
        "accounted_step": found.accounting.step if found.accounting else None,
        "shares": list(_shares(found.accounting)),
        "goodput": found.accounting.goodput if found.accounting else None,
        "restarts": found.restarts,
        "settings": [(key, _setting(value)) for key, value in flat(found.config).items()],
    }
    return page_from("run.html.jinja", content)


def _cards(summary: Summary) -> Iterator[Card]:
    if summary.steps:
        final = "not finite" if summary.final_loss is None else loss_text(summary.final_loss)
        yield Card("loss", final, f"from {loss_text(summary.first_loss)}")
    if summary.eval_loss is not None:
        yield Card("eval loss", loss_text(summary.eval_loss))
    if summary.step_seconds_median is not None:
        note = f"predicted {seconds_text(summary.predicted_step_seconds)}"
        yield Card("step time", seconds_text(summary.step_seconds_median), note)
    elif summary.predicted_step_seconds is not None:
        yield Card("step time", seconds_text(summary.predicted_step_seconds), "predicted")
    if summary.tokens_per_second is not None:
        note = rate_text(summary.samples_per_second or 0, "samples")
        yield Card("tokens/s", f"{summary.tokens_per_second:,.0f}", note)
    elif summary.samples_per_second is not None:
        yield Card("samples/s", f"{summary.samples_per_second:,.1f}")
    if summary.mfu is not None:
        yield Card("MFU", percent_text(summary.mfu), "model FLOPs utilisation")
    if summary.peak_memory_bytes is not None:
        note = f"predicted {bytes_text(summary.predicted_peak_memory_bytes)}"
        yield Card("peak memory", bytes_text(summary.peak_memory_bytes), note)
    if summary.goodput is not None:
        yield Card("goodput", percent_text(summary.goodput), "of the wall time trained the model")
    if summary.num_parameters is not None:
        yield Card("parameters", count_text(summary.num_parameters))
    if summary.total_seconds is not None:
        steps = f"{summary.steps} steps"
        yield Card("wall time", clock_text(summary.total_seconds), steps)


def _promises(found: Reported) -> Iterator[Both]:
    last = found.records[-1] if found.records else {}
    for name, predicted, measured, off in beside_measured(found.plan, found.summary, last).rows:
        shown = _writer(name)
        most = max(predicted, measured) or 1.0
        yield Both(
            name.removesuffix("_seconds").removesuffix("_bytes").replace("_", " "),
            shown(predicted),
            shown(measured),
            "" if off is None else f"{1 / (1 + off) - 1:+.0%}" if off > -1 else "",
            predicted / most * 100,
            measured / most * 100,
        )


def _writer(name: str) -> Any:
    if name.endswith("_bytes"):
        return bytes_text
    return percent_text if name.endswith("_fraction") else seconds_text


def _plan_words(plan: Plan) -> str:
    many = "s" if len(plan.stages) != 1 else ""
    return (
        f"{plan.method}, {len(plan.stages)} stage{many}, {plan.num_micro_batches} microbatches, "
        f"{plan.schedule}, {plan.num_devices} devices"
    )


def _stages(plan: Plan) -> Iterator[list[str]]:
    columns, rows = plan_tables(plan)["plan/stages"]
    for row in rows:
        stage = dict(zip(columns, row, strict=True))
        yield [
            str(stage["stage"]),
            str(stage["layers"]),
            str(stage["devices"]),
            f"{stage['data']} × {stage['model']}",
            count_text(stage["parameters"]),
            str(stage["remat"]),
            *(seconds_text(stage[f"{name}_seconds"]) for name in ("forward", "backward", "update")),
            bytes_text(stage["memory_bytes"]),
        ]


def _charts(records: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    drawn = [
        chart(
            "loss",
            "step",
            [
                metric(records, "train/loss", "train", "first"),
                metric(records, "eval/loss", "validation", "second"),
            ],
            loss_text,
        ),
        chart(
            "step time",
            "step",
            [
                metric(records, "perf/step_seconds", "step", "first"),
                metric(records, "data/wait_seconds", "wait for data", "second"),
            ],
            seconds_text,
            from_zero=True,
        ),
        chart(
            "gradient norm",
            "step",
            [metric(records, "train/grad_norm", "gradient norm", "third")],
            loss_text,
        ),
        chart(
            "learning rate",
            "step",
            [metric(records, "train/learning_rate", "learning rate", "third")],
            lambda value: f"{value:.2g}",
            from_zero=True,
        ),
    ]
    return (one for one in drawn if one)


def _parts(accounting: StepBreakdown | None) -> Iterator[Both]:
    if accounting is None or not accounting.parts:
        return
    step = max(accounting.predicted_step_seconds, accounting.measured_step_seconds or 0.0)
    most = max(max(p.predicted_seconds, p.measured_seconds) for p in accounting.parts) or 1.0
    for part in accounting.parts:
        both = part.predicted_seconds, part.measured_seconds
        if max(map(abs, both)) >= _SMALL * step:
            more = part.measured_seconds - part.predicted_seconds
            yield Both(
                part.name,
                seconds_text(part.predicted_seconds),
                seconds_text(part.measured_seconds),
                f"{more / step:+.0%}" if step else "",
                max(0.0, part.predicted_seconds) / most * 100,
                max(0.0, part.measured_seconds) / most * 100,
            )


def _shares(accounting: StepBreakdown | None) -> Iterator[Share]:
    if accounting is None or not accounting.goodput.wall_seconds:
        return
    good = accounting.goodput
    for phase in PHASES:
        if seconds := good.seconds(phase):
            yield Share(phase, seconds_text(seconds), seconds / good.wall_seconds * 100)


def _setting(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
