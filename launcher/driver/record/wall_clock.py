"""Wall time of a running training, divided into phases."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from launcher.driver.callback import Callback
from launcher.report.breakdown import Goodput

_MOST_LOST = 100_000  # steps since a checkpoint


class WallClock(Callback):
    """Counts each moment of a run in one phase, from one `lap` to the next.

    Args:
        before: of the run's earlier starts.
        began: when this process began, in seconds since the epoch.
        clock: returns seconds since the epoch.

    Attributes:
        good: the time by phases, up to the last lap.
        held_up: seconds for which saves held training up, of this process.
        steps: the steps that this process has made, each as often as it made it.
    """

    def __init__(
        self, before: Goodput, began: float, clock: Callable[[], float] = time.time
    ) -> None:
        self.good, self.held_up, self.steps = before, 0.0, 0
        self._clock, self._at = clock, began
        # The newest steps and their seconds: a failure may lose them.
        self._newest: deque[tuple[int, float]] = deque(maxlen=_MOST_LOST)

    def lap(self, phase: str) -> float:
        """Count the time since the last lap to a phase of `Goodput`; return its seconds."""
        now = self._clock()
        seconds, self._at = max(0.0, now - self._at), now
        self.good = self.good.with_seconds(phase, seconds)
        return seconds

    def move(self, seconds: float, source: str, target: str) -> None:
        """Move seconds from one phase to another, at most all of them."""
        self.good = self.good.moved(seconds, source, target)

    def save(self) -> None:
        """Count the time since the last lap as held up by a save."""
        self.held_up += self.lap("saving")

    def step(self, step: int, metrics: Mapping[str, float], evaluated: bool = False) -> None:
        """Count the time since the last lap to training, without the wait for data.

        Args:
            step: the step that ended.
            metrics: its metrics.
            evaluated: whether an evaluation followed it, and ended; what the step took is then in
                the evaluation's time.
        """
        seconds = self.lap("training")
        if evaluated:
            seconds = min(metrics.get("perf/step_seconds", 0.0), self.good.evaluating_seconds)
            self.move(seconds, "evaluating", "training")
        stalled = min(metrics.get("data/stall_seconds", 0.0), seconds)
        self.move(stalled, "training", "data")
        self._newest.append((step, seconds - stalled))
        self.steps += 1

    def on_restart(self, step: int, why: str) -> None:
        """Count the work after `step`, and the time since the last lap, as redone."""
        self.lap("redone")
        lost = sum(seconds for lost, seconds in self._newest if lost > step)
        self.move(lost, "training", "redone")
        self._newest.clear()


def with_lost(
    before: Goodput, counted: int, finished: int, records: Iterable[Mapping[str, Any]]
) -> Goodput:
    """Correct an earlier start's time by its metrics, once it is known which steps count.

    A killed attempt never reported its last steps; they are recovered from the metrics.

    Args:
        before: the time as reported.
        counted: the newest step in that report.
        finished: the newest step that a checkpoint holds.
        records: its logged steps.
    """
    last = 0
    for record in records:
        step, seconds = record["step"], record.get("perf/step_seconds") or 0.0
        seconds *= step - last
        last = step
        if step > counted:
            before = before.with_seconds("training", seconds)
        if step > finished:
            before = before.moved(seconds, "training", "redone")
    return before
