"""Breakdown of a step's time, predicted beside measured, and of a run's wall time.

`accounting.json` in a run's folder holds both. `launcher.plan.breakdown` divides the plan's step,
`measured` a recorded one, and `break_down` compares them. *Goodput*, a
word of Google's (2024), is the share of the devices' time in which the model was trained.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from launcher.base import DamagedError, read_json, write_whole
from launcher.base.reading import read
from launcher.plan.breakdown import PARTS, StageParts, StepSeconds, predicted_seconds
from launcher.report.console import table_of
from launcher.report.jsonl import json_number
from launcher.report.measured import measured_seconds
from launcher.report.pages.timeline import ProcessSpans
from launcher.report.plan_table import Rows, predicted_memory
from launcher.report.summary import performance
from launcher.report.text import seconds_text
from launcher.report.verdict import judged

if TYPE_CHECKING:
    from launcher.plan import Plan


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run's wall time by phases; their sum is the wall time.

    Attributes:
        training_seconds: steps that count, without the waits below.
        compiling_seconds: the workers compiled.
        starting_seconds: processes came up, the state was created or restored, processes ended.
        planning_seconds: the data was read, the step was traced and planned.
        saving_seconds: training waited for a save.
        evaluating_seconds: the model was evaluated.
        data_seconds: the devices waited for a batch.
        redone_seconds: steps that a failure lost, and that were done again.
        devices: the number of devices that were held.
        price_per_device_hour: of the cluster, if it is known.
    """

    training_seconds: float = 0.0
    compiling_seconds: float = 0.0
    starting_seconds: float = 0.0
    planning_seconds: float = 0.0
    saving_seconds: float = 0.0
    evaluating_seconds: float = 0.0
    data_seconds: float = 0.0
    redone_seconds: float = 0.0
    devices: int = 1
    price_per_device_hour: float | None = None

    def seconds(self, phase: str) -> float:
        """Return the seconds of one of `PHASES`."""
        return float(getattr(self, f"{phase}_seconds"))

    @property
    def wall_seconds(self) -> float:
        """The wall time of the run, over all of its starts."""
        return sum(map(self.seconds, PHASES))

    @property
    def goodput(self) -> float | None:
        """The share of the wall time in which the model was trained, 0 … 1; None of no time."""
        return self.training_seconds / self.wall_seconds if self.wall_seconds > 0 else None

    @property
    def cost(self) -> float | None:
        """What the devices cost for the wall time, None where their price is not known."""
        if self.price_per_device_hour is None:
            return None
        return self.wall_seconds / 3600 * self.devices * self.price_per_device_hour

    def with_seconds(self, phase: str, seconds: float) -> Goodput:
        """Return it with that many seconds more in a phase, but never less than none there."""
        more: dict[str, Any] = {f"{phase}_seconds": max(0.0, self.seconds(phase) + seconds)}
        return dataclasses.replace(self, **more)

    def moved(self, seconds: float, source: str, target: str) -> Goodput:
        """Return it with seconds moved to another phase, at most all of them.

        Args:
            seconds: how many; below 0, none.
            source: the phase that they were counted in.
            target: the phase that they belong to.
        """
        there = min(max(0.0, seconds), self.seconds(source))
        return self.with_seconds(source, -there).with_seconds(target, there)


# The phases, in the order in which they are shown.
PHASES = tuple(
    field.name.removesuffix("_seconds")
    for field in dataclasses.fields(Goodput)
    if field.name.endswith("_seconds")
)

FILE = "accounting.json"
_NS = 1e9
_SIDES = ("predicted", "measured")
_DERIVED = frozenset({"wall_seconds", "goodput", "cost"})


@dataclass(frozen=True)
class StepPart:
    """One of `PARTS` of a step: seconds of a device, in the mean over all devices of the plan.

    Attributes:
        name: which.
        predicted_seconds: as the plan has it.
        measured_seconds: as it was.
    """

    name: str
    predicted_seconds: float
    measured_seconds: float


@dataclass(frozen=True)
class StageBreakdown:
    """A stage's time, predicted and measured."""

    predicted: StageParts
    measured: StageParts


@dataclass(frozen=True)
class LinkWait:
    """Time for which devices of a mesh wait in a step for arrays in transfer from another mesh.

    Attributes:
        source: the stages of the mesh that sends.
        target: the stages of the mesh that waits.
        predicted_seconds: as the plan has it.
        measured_seconds: as it was.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    predicted_seconds: float
    measured_seconds: float


@dataclass(frozen=True)
class Memory:
    """Bytes of memory of the fullest device; the peak of emulated ones is counted in the programs.

    Attributes:
        now: in use after the newest step.
        peak: the most that was in use.
        predicted: the most that the plan counts with.
    """

    now: int | None = None
    peak: int | None = None
    predicted: int | None = None


@dataclass(frozen=True)
class StepBreakdown:
    """Breakdown of the time of a run's step.

    Attributes:
        step: the number of the recorded step; None: none was recorded.
        predicted_step_seconds: the plan's step.
        measured_step_seconds: the recorded step from its batch to its end, and each step's share of
            what saves held up; without a recorded step, the median. None: not known yet.
        median_step_seconds: the median of the run's steps, which are not recorded.
        samples_per_second: of `measured_step_seconds`, as the following.
        tokens_per_second: None where samples have no tokens.
        mfu: model FLOPs utilisation, a fraction of one; None where the device's peak is unknown.
        mfu_with_remat: the same with the recomputed operations.
        memory: of the fullest device.
        sentence: where measured and predicted step differ by over 25 %: which assumption failed,
            and what to do.
        culprit: what that sentence names, in one word: "stage 1", "link 0-1", "data", "saves",
            "collectives", "driver", "bubble", "compute"; else "".
        parts: each of `PARTS`, if devices were recorded. The sum of each side is its step.
        stages: each stage, if devices were recorded.
        links: each pair of meshes that exchange arrays, if devices were recorded.
        clock_skew_seconds: how far the clocks of two processes were apart, which is corrected for.
        clock_uncertainty_seconds: by how much times of two processes may be off.
        finished_steps: the steps that the run had finished.
        goodput: the run's wall time, divided.
    """

    predicted_step_seconds: float
    step: int | None = None
    measured_step_seconds: float | None = None
    median_step_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    mfu_with_remat: float | None = None
    memory: Memory = Memory()
    sentence: str = ""
    culprit: str = ""
    parts: tuple[StepPart, ...] = ()
    stages: tuple[StageBreakdown, ...] = ()
    links: tuple[LinkWait, ...] = ()
    clock_skew_seconds: float = 0.0
    clock_uncertainty_seconds: float = 0.0
    finished_steps: int = 0
    goodput: Goodput = field(default_factory=Goodput)

    def part(self, name: str) -> StepPart:
        """Return one of `PARTS`, with zero seconds if no device was recorded."""
        return next((part for part in self.parts if part.name == name), StepPart(name, 0.0, 0.0))

    @property
    def longer_step_seconds(self) -> float:
        """The longer one of the predicted and the measured step."""
        return max(self.predicted_step_seconds, self.measured_step_seconds or 0.0)

    def large_parts(self, share: float = 0.01) -> list[StepPart]:
        """Return the parts that are at least this share of the step."""
        least = share * self.longer_step_seconds
        return [
            part
            for part in self.parts
            if max(abs(part.predicted_seconds), abs(part.measured_seconds)) >= least
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able data, with the derived sums beside the parts."""
        tree = dataclasses.asdict(self)
        tree["goodput"] |= {name: getattr(self.goodput, name) for name in _DERIVED}
        finite: dict[str, Any] = _finite(tree)
        return finite

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> StepBreakdown:
        """Read the data of `to_dict`.

        Raises:
            DamagedError: it has another form; the message says where.
        """
        try:
            own = {k: v for k, v in tree["goodput"].items() if k not in _DERIVED}
            return read(cls, {**tree, "goodput": own})
        except (LookupError, TypeError, AttributeError) as error:
            raise DamagedError(f"this is not a step's breakdown: {error}") from error

    def save(self, folder: Path) -> None:
        """Write `accounting.json` into a run's folder, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        write_whole(folder / FILE, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """Return JSON-able data in which numbers that are not finite are null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return json_number(value) if isinstance(value, float) else value


def read_breakdown(folder: Path) -> StepBreakdown | None:
    """Read the breakdown in a run's folder; None if there is none, or it is damaged."""
    try:
        return StepBreakdown.from_dict(read_json(folder / FILE))
    except (OSError, DamagedError):
        return None


@dataclass(frozen=True)
class Known:
    """Measurements of a run beside its recorded step.

    Attributes:
        median_step_seconds: the median of its steps.
        saves_seconds: seconds a step for which saves hold training up.
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


def break_down(
    plan: Plan,
    known: Known,
    step: int | None = None,
    parts: Sequence[ProcessSpans] = (),
    goodput: Goodput | None = None,
) -> StepBreakdown:
    """Return the breakdown of a run's step, beside its plan's.

    Args:
        plan: the plan.
        known: further measurements of the run.
        step: the number of the recorded step, if there is one.
        parts: the spans that each process recorded in it, on one clock.
        goodput: the run's wall time, divided.
    """
    measured = measured_seconds(parts, plan.stages)
    seconds, sides, clocks = known.median_step_seconds, {}, []
    if measured is not None:
        _add_saves(measured, known.saves_seconds)
        seconds, sides = measured.step_seconds, _side_by_side(plan, measured)
        clocks = [part.clock for part in parts]
    rates = performance(seconds, plan, known.samples, known.tokens) if seconds else {}
    once, mfu = plan.predicted_tflops_per_device, rates.get("perf/mfu")
    remat = plan.predicted_tflops_per_device_with_remat / once if once else 1
    offsets = [clock.offset for clock in clocks]
    return StepBreakdown(
        plan.predicted_step_seconds,
        step=step if measured else None,
        measured_step_seconds=seconds,
        median_step_seconds=known.median_step_seconds,
        samples_per_second=rates.get("perf/samples_per_second"),
        tokens_per_second=rates.get("perf/tokens_per_second"),
        mfu=mfu,
        mfu_with_remat=None if mfu is None else mfu * remat,
        memory=Memory(known.memory_now, known.memory_peak, predicted_memory(plan)),
        clock_skew_seconds=(max(offsets, default=0) - min(offsets, default=0)) / _NS,
        clock_uncertainty_seconds=sum(sorted(clock.uncertainty for clock in clocks)[-2:]) / _NS,
        goodput=goodput or Goodput(),
        **sides,
    )


def _add_saves(measured: StepSeconds, seconds: float) -> None:
    """Add a step's share of the time that saves take, in which the devices are idle."""
    measured.step_seconds += seconds
    measured.parts["saves"] += seconds
    for stage, row in measured.stages.items():
        idle = row.idle_seconds + seconds
        measured.stages[stage] = dataclasses.replace(row, idle_seconds=idle)


def _side_by_side(plan: Plan, measured: StepSeconds) -> dict[str, Any]:
    """Return the fields of a `StepBreakdown` that compare a recorded step with the plan's."""
    predicted = predicted_seconds(plan)
    stages_of: dict[int, list[int]] = {}
    for stage, mesh in enumerate(plan.mesh_of):
        stages_of.setdefault(mesh, []).append(stage)
    culprit, sentence = judged(predicted, measured, stages_of)
    sides = predicted, measured
    return {
        "culprit": culprit,
        "sentence": sentence,
        "parts": tuple(StepPart(name, *(side.parts[name] for side in sides)) for name in PARTS),
        "stages": tuple(
            StageBreakdown(*(side.stages.get(stage, StageParts(stage)) for side in sides))
            for stage in sorted(predicted.stages.keys() | measured.stages.keys())
        ),
        "links": tuple(
            LinkWait(
                tuple(stages_of.get(link[0], ())),
                tuple(stages_of.get(link[1], ())),
                *(side.waits.get(link, 0.0) for side in sides),
            )
            for link in sorted(predicted.waits.keys() | measured.waits.keys())
        ),
    }


def breakdown_tables(breakdown: StepBreakdown) -> dict[str, Rows]:
    """Return the parts of a step and its stages, predicted and measured, as trackers' tables.

    Without a recorded step there are none.
    """
    if not breakdown.parts:
        return {}
    sides = [(p.name, p.predicted_seconds, p.measured_seconds) for p in breakdown.parts]
    step = "step", breakdown.predicted_step_seconds, breakdown.measured_step_seconds or 0.0
    names = ("forward", "backward", "update", "idle", "others", "step")
    fields = [(side, f"{name}_seconds") for name in names for side in _SIDES]
    stages = [
        [s.measured.stage, *(getattr(getattr(s, side), field) for side, field in fields)]
        for s in breakdown.stages
    ]
    return {
        "accounting": Rows(
            ["part", *(f"{side}_seconds" for side in _SIDES), "more"],
            [[name, before, after, after - before] for name, before, after in (*sides, step)],
        ),
        "measured_stages": Rows(["stage", *(f"{side}_{f}" for side, f in fields)], stages),
    }


def in_summary(breakdown: StepBreakdown) -> dict[str, Any]:
    """Return the fields of a summary that follow from the breakdown."""
    good = breakdown.goodput
    return {
        "mfu_with_remat": breakdown.mfu_with_remat,
        "goodput": good.goodput,
        "goodput_seconds": {phase: good.seconds(phase) for phase in PHASES},
        "cost": good.cost,
        "accounting": {p.name: p.measured_seconds - p.predicted_seconds for p in breakdown.parts},
        "differs": breakdown.sentence,
    }


def print_breakdown(console: Console, breakdown: StepBreakdown) -> None:
    """Print a step's breakdown, and the reason where it differs from the prediction.

    Parts that are no share of the step have no line, nor has a difference of clocks that is within
    their uncertainty; without a recorded step nothing is printed.
    """
    if not breakdown.parts:
        return
    rows = [
        (p.name, *(seconds_text(s or None) for s in (p.predicted_seconds, p.measured_seconds)))
        for p in breakdown.large_parts()
    ]
    names = (f"step {breakdown.step}", "predicted", "measured")
    console.print()
    console.print(table_of(names, rows, names[:1]))
    if breakdown.sentence:
        console.print(breakdown.sentence, soft_wrap=True)
    skew, uncertainty = breakdown.clock_skew_seconds, breakdown.clock_uncertainty_seconds
    if skew > uncertainty:
        console.print(
            f"The processes' clocks were {seconds_text(skew)} apart, which is corrected for; times "
            f"of two processes may be off by {seconds_text(uncertainty)}.",
            soft_wrap=True,
        )
