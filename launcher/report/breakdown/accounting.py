"""Where a step's time went, against where the plan said that it would go. Plain data.

`accounting.json` in a run's folder. `step_parts` splits a recorded step, `predicted_parts` the
plan's, and `account` puts them side by side.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.base.files import DamagedError, read_json, write_whole
from launcher.base.reading import read
from launcher.report.breakdown.goodput import Goodput
from launcher.report.jsonl import json_number

FILE = "accounting.json"

# What a device's time in a step goes into, in the order in which it is shown.
PARTS = ("compute", "collectives", "transfers", "bubble", "driver", "data", "saves", "residue")


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
class StageRow:
    """What the devices of a stage do during a step, in seconds; the sum is that of the step.

    Attributes:
        stage: the stage.
        forward_seconds: forward passes, collectives included. Where both passes are one program, it
            is divided as the plan divides them.
        backward_seconds: backward passes, collectives included.
        update_seconds: the update, with the sums of gradients that no pass hides.
        idle_seconds: no program of any stage runs on them.
        others_seconds: other stages on the same devices run.
    """

    stage: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    update_seconds: float = 0.0
    idle_seconds: float = 0.0
    others_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        """Seconds in which the stage itself runs."""
        return self.forward_seconds + self.backward_seconds + self.update_seconds

    @property
    def step_seconds(self) -> float:
        """The sum of the row."""
        return self.busy_seconds + self.idle_seconds + self.others_seconds


@dataclass(frozen=True)
class StageAccount:
    """A stage as it was predicted, and as it was."""

    predicted: StageRow
    measured: StageRow


@dataclass(frozen=True)
class LinkAccount:
    """How long the devices of one mesh waited in a step for arrays on their way from another.

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
class Accounting:
    """Where the time of a run's step went.

    Attributes:
        step: the recorded step that it is of; None: none was recorded.
        predicted_step_seconds: the plan's step.
        measured_step_seconds: the recorded step from its batch to its end, and each step's share of
            what saves held up; without a recorded step, the median. None: not known yet.
        median_step_seconds: the median of the run's steps, which are not recorded.
        samples_per_second: of `measured_step_seconds`, as the following.
        tokens_per_second: None where samples have no tokens.
        mfu: model FLOPs utilisation, a fraction of one; None where the device's peak is unknown.
        mfu_with_remat: the same with the operations that are computed again.
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
        goodput: what the run's wall time went into.
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
    stages: tuple[StageAccount, ...] = ()
    links: tuple[LinkAccount, ...] = ()
    clock_skew_seconds: float = 0.0
    clock_uncertainty_seconds: float = 0.0
    finished_steps: int = 0
    goodput: Goodput = field(default_factory=Goodput)

    def part(self, name: str) -> StepPart:
        """Return one of `PARTS`; of none, if no device was recorded."""
        return next((part for part in self.parts if part.name == name), StepPart(name, 0.0, 0.0))

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data, with the sums that a reader wants beside the parts."""
        tree = dataclasses.asdict(self)
        good = self.goodput
        tree["goodput"] |= {
            "wall_seconds": good.wall_seconds,
            "goodput": good.goodput,
            "cost": good.cost,
        }
        finite: dict[str, Any] = _finite(tree)
        return finite

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Accounting:
        """Return the accounting from the data of `to_dict`.

        Raises:
            DamagedError: it is something else; the message says where.
        """
        try:
            own = {k: v for k, v in tree["goodput"].items() if k not in _DERIVED}
            return read(cls, {**tree, "goodput": own})
        except (LookupError, TypeError, AttributeError) as error:
            raise DamagedError(f"this is not an accounting: {error}") from error

    def save(self, folder: Path) -> Path:
        """Write `accounting.json` into a run's folder, whole or not at all; return its path.

        Raises:
            OSError: it cannot be written.
        """
        path = folder / FILE
        write_whole(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")
        return path


_DERIVED = frozenset({"wall_seconds", "goodput", "cost"})


def _finite(value: Any) -> Any:
    """Return JSON-able data in which numbers that are not finite are null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return json_number(value) if isinstance(value, float) else value


def read_accounting(folder: Path) -> Accounting | None:
    """Return the accounting of a run's folder; None if there is none, or it is damaged."""
    try:
        return Accounting.from_dict(read_json(folder / FILE))
    except (OSError, DamagedError):
        return None
