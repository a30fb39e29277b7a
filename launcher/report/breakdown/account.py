"""Puts a plan's step and the recorded one side by side. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.report.breakdown.accounting import (
    PARTS,
    Accounting,
    LinkAccount,
    Memory,
    StageAccount,
    StageRow,
    StepPart,
)
from launcher.report.breakdown.goodput import Goodput
from launcher.report.breakdown.predicted_parts import (
    forward_shares,
    predicted_seconds,
    update_shares,
)
from launcher.report.breakdown.step_parts import StepSeconds, measured_seconds
from launcher.report.breakdown.verdict import Judgement, judged
from launcher.report.metrics import performance
from launcher.report.pages.timeline import ProcessSpans
from launcher.report.plan_record import predicted_memory

if TYPE_CHECKING:
    from launcher.plan.plan import Plan


_NS = 1e9


@dataclass(frozen=True)
class Known:
    """What a run knows beside its plan and a recorded step.

    Attributes:
        median_step_seconds: the median of its steps.
        saves_seconds: what saves held training up for, a step.
        samples: samples in the global batch.
        tokens: tokens in the global batch, None where samples have none.
        memory_now: bytes in use after the newest step.
        memory_peak: the most bytes that were in use.
    """

    samples: int
    tokens: int | None = None
    median_step_seconds: float | None = None
    saves_seconds: float = 0.0
    memory_now: int | None = None
    memory_peak: int | None = None


def account(
    plan: Plan,
    known: Known,
    step: int | None = None,
    parts: Sequence[ProcessSpans] = (),
    goodput: Goodput | None = None,
) -> Accounting:
    """Return where the time of a run's step went, against its plan.

    Args:
        plan: the plan.
        known: what else the run knows.
        step: the number of the recorded step, if there is one.
        parts: what each process recorded of it, on one clock.
        goodput: what the run's wall time went into.
    """
    measured = measured_seconds(parts, forward_shares(plan), update_shares(plan))
    predicted = predicted_seconds(plan)
    good = goodput or Goodput()
    if measured is None:
        seconds = known.median_step_seconds
        found = Accounting(plan.predicted_step_seconds, goodput=good)
    else:
        measured = _with_saves(measured, known.saves_seconds)
        seconds = measured.step_seconds
        found = _side_by_side(plan, predicted, measured)
    with_remat = plan.predicted_tflops_per_device_with_remat
    again = with_remat / plan.predicted_tflops_per_device if plan.predicted_tflops_per_device else 1
    rates: dict[str, Any] = {}
    if seconds:
        rates = performance(
            seconds,
            samples=known.samples,
            tokens=known.tokens,
            flops=plan.flops_per_step,
            devices=plan.num_devices,
            peak_flops=plan.cluster["peak_flops"],
        )
    mfu = rates.get("perf/mfu")
    clocks = [part.clock for part in parts] if measured else []
    ahead = [clock.offset for clock in clocks]
    return dataclasses.replace(
        found,
        step=step if measured else None,
        measured_step_seconds=seconds,
        median_step_seconds=known.median_step_seconds,
        samples_per_second=rates.get("perf/samples_per_second"),
        tokens_per_second=rates.get("perf/tokens_per_second"),
        mfu=mfu,
        mfu_with_remat=None if mfu is None else mfu * again,
        memory=Memory(known.memory_now, known.memory_peak, predicted_memory(plan)),
        clock_skew_seconds=(max(ahead, default=0) - min(ahead, default=0)) / _NS,
        clock_uncertainty_seconds=sum(sorted(clock.uncertainty for clock in clocks)[-2:]) / _NS,
        goodput=good,
    )


def _with_saves(measured: StepSeconds, seconds: float) -> StepSeconds:
    """Return a step with its share of what saves held up, in which the devices are idle."""
    rows = {
        s: dataclasses.replace(row, idle_seconds=row.idle_seconds + seconds)
        for s, row in measured.stages.items()
    }
    parts = {**measured.parts, "saves": measured.parts["saves"] + seconds}
    return StepSeconds(measured.step_seconds + seconds, parts, rows, measured.waits)


def _side_by_side(plan: Plan, predicted: StepSeconds, measured: StepSeconds) -> Accounting:
    stages_of: dict[int, list[int]] = {}
    for stage, mesh in enumerate(plan.mesh_of):
        stages_of.setdefault(mesh, []).append(stage)
    verdict: Judgement = judged(predicted, measured, stages_of)
    stages = sorted(predicted.stages.keys() | measured.stages.keys())
    links = sorted(predicted.waits.keys() | measured.waits.keys())
    return Accounting(
        plan.predicted_step_seconds,
        sentence=verdict.sentence,
        culprit=verdict.culprit,
        parts=tuple(StepPart(name, predicted.parts[name], measured.parts[name]) for name in PARTS),
        stages=tuple(
            StageAccount(predicted.stages.get(s, StageRow(s)), measured.stages.get(s, StageRow(s)))
            for s in stages
        ),
        links=tuple(
            LinkAccount(
                tuple(stages_of.get(a, ())),
                tuple(stages_of.get(b, ())),
                predicted.waits.get((a, b), 0.0),
                measured.waits.get((a, b), 0.0),
            )
            for a, b in links
        ),
    )
