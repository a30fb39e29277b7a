"""Which assumption of a plan failed where its step takes another time than predicted. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launcher.report.breakdown.step_parts import StepSeconds
from launcher.report.text import percent_text, seconds_text

TOLERANCE = 0.25  # of the predicted step
_ALIKE = 1.5  # stages whose measured and predicted seconds differ by no more than this are alike
_SHARE = 1 / 3  # of the difference that something else has to explain before the bubble is named


class Judgement(NamedTuple):
    """What explains most of a difference, in a word and in a sentence; both "" where there is none.

    Attributes:
        culprit: see `Accounting.culprit`.
        sentence: which assumption failed, and what to do.
    """

    culprit: str
    sentence: str


class _Found(NamedTuple):
    culprit: str
    excess: float  # seconds of a step
    because: str
    remedy: str


def judged(
    predicted: StepSeconds, measured: StepSeconds, stages_of: Mapping[int, Sequence[int]]
) -> Judgement:
    """Return what explains most of the difference between a predicted and a measured step.

    Args:
        predicted: the plan's step.
        measured: the step as it was.
        stages_of: the stages of each mesh.
    """
    difference = measured.step_seconds - predicted.step_seconds
    if abs(difference) <= TOLERANCE * predicted.step_seconds:
        return Judgement("", "")
    candidates = [
        _compute(predicted, measured, difference),
        *_links(predicted, measured, stages_of),
        *_others(predicted, measured),
    ]
    sign = 1 if difference > 0 else -1
    best = max((c for c in candidates if c), key=lambda c: sign * c.excess)
    if sign * best.excess < _SHARE * abs(difference):
        best = _bubble(predicted, measured)
    return Judgement(
        best.culprit, f"{_headline(predicted, measured)}, {best.because}: {best.remedy}"
    )


def _headline(predicted: StepSeconds, measured: StepSeconds) -> str:
    there, then = measured.step_seconds, predicted.step_seconds
    off = there / then - 1 if then else 0.0
    how = f"{percent_text(abs(off))} {'more' if off > 0 else 'less'} than"
    if off > 1:
        how = f"{1 + off:.1f} times"
    return f"the step takes {seconds_text(there)}, {how} the predicted {seconds_text(then)}"


def _not(measured: float, predicted: float) -> str:
    return f"{seconds_text(measured)} a step instead of {seconds_text(predicted)}"


def _compute(predicted: StepSeconds, measured: StepSeconds, difference: float) -> _Found | None:
    """Return the stage that explains most, or all of them where they are off alike."""
    pairs = {
        s: (predicted.stages[s].busy_seconds, measured.stages[s].busy_seconds)
        for s in predicted.stages.keys() & measured.stages.keys()
    }
    if not pairs:
        return None
    sign = 1 if difference > 0 else -1
    worst = max(sorted(pairs), key=lambda s: sign * (pairs[s][1] - pairs[s][0]))
    before, there = pairs[worst]
    excess = there - before
    ratios = {s: b / a for s, (a, b) in pairs.items() if a > 0}
    rest = [ratio for s, ratio in ratios.items() if s != worst]
    others = statistics.median(rest) if rest else None
    own = ratios.get(worst, float("inf"))
    alike = others is not None and 1 / _ALIKE < own / others < _ALIKE
    if len(pairs) == 1 or not alike:
        than = f", the other stages {others:.1f} times their own" if others is not None else ""
        return _Found(
            f"stage {worst}",
            excess,
            f"mostly by the compute of stage {worst}: its passes and update take "
            f"{_not(there, before)}{than}",
            "the seconds of its layers are not as assumed; parallel.cost=profile measures them",
        )
    ratio = statistics.median(ratios.values())
    return _Found(
        "compute",
        excess,
        f"mostly by the compute of all stages, which takes {ratio:.1f} times what was predicted",
        "the devices' rates are not as assumed; task=calibrate measures them, "
        "parallel.cost=profile this model's layers",
    )


def _links(
    predicted: StepSeconds, measured: StepSeconds, stages_of: Mapping[int, Sequence[int]]
) -> list[_Found]:
    """Return what each pair of meshes waited for arrays of the other, both ways together."""
    pairs = {(min(link), max(link)) for link in (*predicted.waits, *measured.waits)}
    found = []
    for a, b in sorted(pairs):
        before, there = (
            side.waits.get((a, b), 0.0) + side.waits.get((b, a), 0.0)
            for side in (predicted, measured)
        )
        names = [",".join(map(str, stages_of.get(mesh, [mesh]))) for mesh in (a, b)]
        found.append(
            _Found(
                f"link {names[0]}-{names[1]}",
                there - before,
                f"mostly by the link between stage {names[0]} and stage {names[1]}: their devices "
                f"wait for arrays on their way for {_not(there, before)}",
                "transfers are not as fast as assumed; task=calibrate measures them",
            )
        )
    return found


def _others(predicted: StepSeconds, measured: StepSeconds) -> list[_Found]:
    before, there = predicted.parts, measured.parts

    def excess(part: str) -> float:
        return there[part] - before[part]

    return [
        _Found(
            "data",
            excess("data"),
            f"mostly by the data: devices wait for their batch for {seconds_text(there['data'])} "
            "a step",
            "a batch is assumed to be there in time; make it faster, or prepare it beforehand",
        ),
        _Found(
            "saves",
            excess("saves"),
            f"mostly by saves, which hold training up for {seconds_text(there['saves'])} a step",
            "saving is assumed to take no time; save less often "
            "(train.checkpoint.every_steps, every_minutes), or to a faster disk",
        ),
        _Found(
            "driver",
            excess("driver"),
            "mostly by sending programs off, for which devices wait for "
            f"{_not(there['driver'], before['driver'])}",
            "programs are too small for their number; take fewer microbatches",
        ),
        _Found(
            "collectives",
            excess("collectives"),
            "mostly by collectives, which take "
            f"{_not(there['collectives'], before['collectives'])}",
            "sums among devices are not as fast as assumed; task=calibrate measures them",
        ),
    ]


def _bubble(predicted: StepSeconds, measured: StepSeconds) -> _Found:
    before, there = predicted.parts["bubble"], measured.parts["bubble"]
    return _Found(
        "bubble",
        there - before,
        f"mostly by devices that wait for one another, for {_not(there, before)}",
        "tasks do not overlap as assumed; parallel.cost=profile measures them with all devices at "
        "work",
    )
