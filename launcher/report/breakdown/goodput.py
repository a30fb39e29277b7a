"""Goodput: what the wall time of a run went into, over all of its starts, and what it cost. Pure.

The word is that of "ML Goodput" (Google, 2024): of the time for which the devices were held, the
share in which the model was trained.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

# What the time goes into, in the order in which it is shown.
PHASES = (
    "training",
    "compiling",
    "starting",
    "planning",
    "saving",
    "evaluating",
    "data",
    "redone",
)


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run's wall time by activity; their sum is the wall time.

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
        """Return it with seconds that turned out to belong to another phase, as far as there are.

        Args:
            seconds: how many; below 0, none.
            source: the phase that they were counted in.
            target: the phase that they belong to.
        """
        there = min(max(0.0, seconds), self.seconds(source))
        return self.with_seconds(source, -there).with_seconds(target, there)
