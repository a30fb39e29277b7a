"""The training loop, in the driver: what happens in which order. `run` calls it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher.config.schema import Checkpoint, Train
from launcher.driver.recorder import Recorder
from launcher.stop import Stop

if TYPE_CHECKING:
    from launcher.driver.saving import Saving
    from launcher.driver.workers import Answers, Workers

IN_FLIGHT = 2  # steps sent ahead of their results: the worker never waits for the driver


def train(
    settings: Train,
    workers: Workers,
    recorder: Recorder,
    stop: Stop,
    finished: int,
    save: Saving,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train from step `finished` + 1 to `settings.steps`, or until a signal asks for the end.

    `save(step)` begins to save the newest step, when the settings ask for it, the last one like any
    other, and at the end, where they or a signal do and there was a step to save. Training goes on
    meanwhile; all is written when this returns. `clock` gives seconds that go on evenly.

    Raises DivergedError, with nothing saved of the step that went wrong, SaveError, and like
    `Workers.result`.
    """
    profiled = profiled_step(settings.steps, finished)
    cadence = Cadence(settings.checkpoint, clock())
    calls: deque[Answers] = deque()
    step = saved = finished
    while step < settings.steps and not stop.requested:
        step += 1
        calls.append(workers.submit("step", step, step == profiled))
        if is_evaluated(step, settings):
            calls += [workers.submit("evaluate", batch) for batch in range(settings.eval_batches)]
        if step < settings.steps and cadence.is_due(step, clock()):
            _finish(workers, calls, recorder)  # only a step that went well is saved
            calls.append(save(step))
            saved = step
        while len(calls) >= IN_FLIGHT:
            recorder.record(calls.popleft().result())
    _finish(workers, calls, recorder)
    recorder.log_newest()
    at_end = settings.checkpoint.at_end or stop.requested
    # The last step may be due like any other, but its save holds up nothing more.
    final = step > finished and bool(at_end or cadence.is_due(step, clock()))
    if final and step != saved:
        save(step).result()
    save.finish(final)


def _finish(workers: Workers, calls: deque[Answers], recorder: Recorder) -> None:
    """Wait for all that was sent, and record it."""
    calls.append(workers.submit("flush"))
    while calls:
        recorder.record(calls.popleft().result())


class Cadence:
    """When the state is to be saved while training goes on. Times in seconds."""

    def __init__(self, settings: Checkpoint, now: float) -> None:
        self._settings = settings
        self._saved_at = now

    def is_due(self, step: int, now: float) -> bool:
        """Whether to save after `step`; if so, the minutes count from now."""
        settings = self._settings
        by_step = settings.every_steps > 0 and step % settings.every_steps == 0
        late = settings.every_minutes > 0 and now - self._saved_at >= 60 * settings.every_minutes
        if by_step or late:
            self._saved_at = now
        return by_step or late


def is_evaluated(step: int, settings: Train) -> bool:
    """Whether an evaluation follows `step`: every so many steps, and the last one in any case."""
    every = settings.eval_every
    return every > 0 and (step % every == 0 or step == settings.steps)


def profiled_step(steps: int, finished: int) -> int:
    """The step that is run task by task to time the stages: the second, when all is warm."""
    return min(finished + 2, steps)


def warm_up(finished: int) -> range:
    """The first steps after a start at `finished`, whose times say nothing of the others': all is
    cold, then it is profiled, and the next one was sent behind that."""
    return range(finished + 1, finished + 4)
