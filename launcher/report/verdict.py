"""Verdict on a step that takes another time than predicted: the assumption that failed. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from launcher.plan.breakdown import StepSeconds
from launcher.report.text import percent_text, seconds_text

TOLERANCE = 0.25  # of the predicted step
_ALIKE = 1.5  # ratios of stages that differ by no more than this factor count as equal
_SHARE = 1 / 3  # of the difference: a cause that explains less yields to the bubble
_CALIBRATE = "task=calibrate measures them"


class _Cause(NamedTuple):
    culprit: str
    excess: float  # seconds of a step
    because: str
    remedy: str


def judged(
    predicted: StepSeconds, measured: StepSeconds, stages_of: Mapping[int, Sequence[int]]
) -> tuple[str, str]:
    """Return the cause of most of the difference between a predicted and a measured step.

    Args:
        predicted: the plan's step.
        measured: the recorded step.
        stages_of: the stages of each mesh.

    Returns:
        The culprit (see `StepBreakdown.culprit`) and a sentence that says which assumption failed
        and what to do; both "" where the difference is within `TOLERANCE`.
    """
    difference = measured.step_seconds - predicted.step_seconds
    if abs(difference) <= TOLERANCE * predicted.step_seconds:
        return "", ""
    sign = 1 if difference > 0 else -1
    candidates = [
        *_compute(predicted, measured, sign),
        *_links(predicted, measured, stages_of),
        *(_part(name, predicted, measured) for name in _PARTS if name != "bubble"),
    ]
    best = max(candidates, key=lambda cause: sign * cause.excess)
    if sign * best.excess < _SHARE * abs(difference):
        best = _part("bubble", predicted, measured)
    headline = _headline(predicted.step_seconds, measured.step_seconds)
    return best.culprit, f"{headline}, mostly by {best.because}: {best.remedy}"


def _headline(predicted: float, measured: float) -> str:
    off = measured / predicted - 1 if predicted else 0.0
    how = f"{percent_text(abs(off))} {'more' if off > 0 else 'less'} than"
    if off > 1:
        how = f"{1 + off:.1f} times"
    return f"the step takes {seconds_text(measured)}, {how} the predicted {seconds_text(predicted)}"


def _not(measured: float, predicted: float) -> str:
    return f"{seconds_text(measured)} a step instead of {seconds_text(predicted)}"


def _compute(predicted: StepSeconds, measured: StepSeconds, sign: int) -> Iterator[_Cause]:
    """Yield the stage that explains most, or all stages where they are off by a like factor."""
    pairs = {
        s: (predicted.stages[s].busy_seconds, measured.stages[s].busy_seconds)
        for s in predicted.stages.keys() & measured.stages.keys()
    }
    if not pairs:
        return
    worst = max(sorted(pairs), key=lambda s: sign * (pairs[s][1] - pairs[s][0]))
    before, after = pairs[worst]
    ratios = {s: b / a for s, (a, b) in pairs.items() if a > 0}
    rest = [ratio for s, ratio in ratios.items() if s != worst]
    others = statistics.median(rest) if rest else None
    if others is not None and 1 / _ALIKE < ratios.get(worst, math.inf) / others < _ALIKE:
        ratio = statistics.median(ratios.values())
        culprit = "compute"
        because = f"the compute of all stages, which takes {ratio:.1f} times what was predicted"
        remedy = (
            f"the devices' rates are not as assumed; {_CALIBRATE}, parallel.cost=profile this "
            "model's layers"
        )
    else:
        than = f", the other stages {others:.1f} times their own" if others is not None else ""
        culprit = f"stage {worst}"
        because = (
            f"the compute of stage {worst}: its passes and update take {_not(after, before)}{than}"
        )
        remedy = "the seconds of its layers are not as assumed; parallel.cost=profile measures them"
    yield _Cause(culprit, after - before, because, remedy)


def _links(
    predicted: StepSeconds, measured: StepSeconds, stages_of: Mapping[int, Sequence[int]]
) -> Iterator[_Cause]:
    """Yield each pair of meshes that wait for arrays of one another, both ways together."""
    pairs = {(min(link), max(link)) for link in (*predicted.waits, *measured.waits)}
    for a, b in sorted(pairs):
        before, after = (
            side.waits.get((a, b), 0.0) + side.waits.get((b, a), 0.0)
            for side in (predicted, measured)
        )
        first, second = (",".join(map(str, stages_of.get(mesh, [mesh]))) for mesh in (a, b))
        yield _Cause(
            f"link {first}-{second}",
            after - before,
            f"the link between stage {first} and stage {second}: their devices wait for arrays in "
            f"transfer for {_not(after, before)}",
            f"transfers are not as fast as assumed; {_CALIBRATE}",
        )


_PARTS = {  # the reason, with the seconds of each side, and the remedy
    "data": (
        "the data: devices wait for their batch for {measured} a step",
        "a batch is assumed to be there in time; make it faster, or prepare it beforehand",
    ),
    "saves": (
        "saves, which hold training up for {measured} a step",
        "saving is assumed to take no time; save less often "
        "(train.checkpoint.every_steps, every_minutes), or to a faster disk",
    ),
    "driver": (
        "the dispatch of programs, for which devices wait for {both}",
        "programs are too small for their number; take fewer microbatches",
    ),
    "collectives": (
        "collectives, which take {both}",
        f"they are not as fast as assumed; {_CALIBRATE}",
    ),
    "bubble": (
        "devices that wait for one another, for {both}",
        "tasks do not overlap as assumed; parallel.cost=profile measures them with all devices at "
        "work",
    ),
}


def _part(name: str, predicted: StepSeconds, measured: StepSeconds) -> _Cause:
    before, after = predicted.parts[name], measured.parts[name]
    because, remedy = _PARTS[name]
    words = because.format(measured=seconds_text(after), both=_not(after, before))
    return _Cause(name, after - before, words, remedy)
