"""Name what slows a run while it trains: samples of its steps, and what they show."""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from launcher.base import Clock
from launcher.driver.callback import Callback
from launcher.driver.record.slow import EVERY, Monitor, Slow, Spot, StepSample, spots_of
from launcher.plan import Plan
from launcher.report.measured import measured_seconds
from launcher.report.pages.timeline import ProcessSpans, Timeline

if TYPE_CHECKING:
    from launcher.train.step_result import Recording, StepResult

_LEAST_SECONDS = 0.2  # from one watched step to the next
_SHARE = 50  # times as long as it takes to evaluate one

_log = logging.getLogger(__name__)


class Slowness(Callback):
    """Watches every few steps, and logs what slows the run.

    Each worker reports the wait for data and the garbage collection of every step. From a watched
    step, where there are several stages, it also reports when its programs and transfers ran, as
    seen by threads that wait for them; no profiler is used.

    Args:
        plan: the run's plan.
        unusual: steps whose times say nothing; it may grow.
        tell: takes what slows the run now, as the field `slow` of its status.
    """

    def __init__(
        self,
        plan: Plan,
        unusual: Collection[int] = (),
        tell: Callable[..., None] = lambda **fields: None,
    ) -> None:
        self._unusual, self._tell = unusual, tell
        self._clocks: Sequence[Clock] = ()
        self._parts: dict[int, dict[int, Recording]] = {}
        self._newest: deque[float] = deque(maxlen=EVERY)  # the seconds of steps
        self._sums: dict[Spot, list[float]] = defaultdict(list)
        self.follow(plan)
        self._next_at, self._taken = 0.0, 0  # the earliest time, and the newest sample's step
        self._shown: str | None = None
        self._costs: dict[str, tuple[float, Slow]] = {}  # by cause: the seconds of the run

    def follow(self, plan: Plan) -> None:
        """Watch the steps of a plan; those of the one before it say nothing of these."""
        self._plan = plan
        self._stages_of: dict[int, list[int]] = defaultdict(list)
        for stage, mesh in enumerate(plan.mesh_of):
            self._stages_of[mesh].append(stage)
        self._monitor = Monitor([stage.hosts for stage in plan.stages])
        self._newest.clear()
        self._sums.clear()

    @property
    def worst(self) -> str:
        """What has cost the run the most time, in a sentence; "" if nothing has."""
        return str(max(self._costs.values(), key=lambda one: one[0])[1]) if self._costs else ""

    def begin(self, clocks: Sequence[Clock]) -> None:
        """Begin an attempt, whose workers have these clocks."""
        self._clocks = clocks
        self._parts.clear()

    def is_watched(self, step: int) -> bool:
        """Return whether workers are to report when the parts of a step ran; it is then due."""
        due = step % EVERY == 0 and step not in self._unusual and len(self._stages_of) > 1
        return due and bool(self._clocks) and time.monotonic() >= self._next_at

    def add(self, result: StepResult, recordings: Sequence[Recording]) -> None:
        """Take a step's result, and what workers recorded of watched steps."""
        if result.step not in self._unusual:
            self._newest.append(result.metrics["perf/step_seconds"])
            for worker, spent in enumerate(result.spent):
                for kind, seconds in spent.items():
                    self._sums[Spot(kind, f"worker {worker}")].append(seconds)
        for recording in recordings:
            parts = self._parts.setdefault(recording.step, {})
            parts[recording.process] = recording
            if len(parts) == len(self._clocks):
                self._evaluate(recording.step, self._parts.pop(recording.step))
        if result.step % EVERY == 0 and len(self._stages_of) == 1:
            self._take(result.step, {})

    def _evaluate(self, step: int, parts: Mapping[int, Recording]) -> None:
        began = time.monotonic()
        spans = [
            ProcessSpans(f"worker {k}", parts[k].spans, clock)
            for k, clock in zip(sorted(parts), self._clocks, strict=True)
        ]
        found = measured_seconds(Timeline().with_step(step, spans).steps[step], self._plan.stages)
        if found is not None:
            self._take(step, spots_of(found, self._stages_of))
        now = time.monotonic()
        self._next_at = now + max(_LEAST_SECONDS, _SHARE * (now - began))

    def _take(self, step: int, watched: Mapping[Spot, float]) -> None:
        """Take what was seen at a watched step, with the means of what steps since have spent."""
        if len(self._newest) < EVERY:
            return
        spent = {spot: statistics.fmean(each) for spot, each in self._sums.items()}
        self._sums.clear()
        slow = self._monitor.add(
            StepSample(step, statistics.median(self._newest), {**spent, **watched})
        )
        if slow is not None:
            before, _ = self._costs.get(slow.cause, (0.0, slow))
            self._costs[slow.cause] = before + slow.seconds * max(0, step - self._taken), slow
        self._taken = step
        shown = slow.cause if slow else None
        if shown == self._shown:
            return
        if slow is not None:
            _log.warning(str(slow))
        else:
            _log.info(f"{self._shown} no longer slows the run, by step {step}")
        self._shown = shown
        self._tell(slow=str(slow) if slow else None)
