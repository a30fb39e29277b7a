"""The training loop in the driver: the order of steps, evaluations and saves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from launcher.config.sections import Checkpoint, Train
from launcher.driver.record.best import Best
from launcher.driver.record.recorder import Recorder, is_evaluated, profiled_step
from launcher.driver.record.samples import Samples
from launcher.stop import Stop

if TYPE_CHECKING:
    from launcher.driver.saving import Saving
    from launcher.driver.workers import Answers, Workers

Calls: TypeAlias = "deque[tuple[str, Answers]]"  # with what each is part of: a phase of `Goodput`

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
    """Train from step `finished` + 1 to `settings.steps`, or until a signal asks to stop.

    Saves go on in the background while training continues; all are complete on return. The last
    step is saved if it is due like any other, if `settings.checkpoint.at_end` is set, or if a
    signal ends the run, provided that a step was made. So is one whose evaluation is the best.

    Args:
        settings: the section `train`, with the number of batches of an evaluation.
        workers: the workers, with their state created or restored.
        recorder: takes the result of each step.
        stop: the signals received.
        finished: the number of steps already finished.
        save: `save(step)` begins to save the state after `step`.
        clock: returns monotonic seconds.

    Raises:
        DivergedError: a step's loss or gradient is not finite; nothing of that step is saved.
        ReplicaError: replicas differ after a step; nothing of that step is saved.
        SaveError: a save failed, and that ends the run.
        WorkerError: and the other errors of `Workers.result`.
    """
    lines, none = recorder.timelines, frozenset[int]()
    recorded, traced = (lines.steps, lines.traced) if lines else (none, none)
    profiled = profiled_step(settings.steps, finished, recorded | traced)
    cadence = Cadence(settings.checkpoint, clock())
    calls: Calls = deque()
    step = saved = finished
    best, samples = recorder.callbacks.of(Best), recorder.callbacks.of(Samples)
    num_batches = settings.eval_batches or 0
    while step < settings.steps and not stop.requested and not (best and best.reason):
        step += 1
        if step in recorded:
            recorder.spans.start()
        how = step == profiled, step in recorded
        trace_in = str(lines.traces.absolute()) if lines and step in traced else None
        calls.append(("training", workers.submit("step", step, *how, trace_in)))
        if is_evaluated(step, settings):
            for batch in range(num_batches):
                calls.append(("evaluating", workers.submit("evaluate", batch)))
            if best and best.follows:
                _finish(workers, calls, recorder)
        if samples and samples.is_due(step):
            calls.append(("training", workers.submit("flush")))
            asked = samples.prompts, samples.most
            calls.append(("sampling", workers.submit("sample", step, *asked)))
        is_best = bool(best and best.is_to_keep(step))
        if step < settings.steps and (cadence.is_due(step, clock()) or is_best):
            _finish(workers, calls, recorder)  # a step that diverged must not be saved
            calls.append(("saving", save(step)))
            saved = step
        while len(calls) >= IN_FLIGHT:
            _record_next(calls, recorder)
    _finish(workers, calls, recorder)
    recorder.log_newest()
    at_end = settings.checkpoint.at_end or stop.requested
    # The last step may be due like any other; nothing has to overlap with its save.
    is_best = bool(best and best.is_to_keep(step))
    final = step > finished and bool(at_end or cadence.is_due(step, clock()) or is_best)
    if final and step != saved:
        save(step).result()
    save.finish(final)
    recorder.wall.lap("saving")


def _finish(workers: Workers, calls: Calls, recorder: Recorder) -> None:
    """Wait for all calls that were sent, and record their results."""
    calls.append(("training", workers.submit("flush")))
    while calls:
        _record_next(calls, recorder)


def _record_next(calls: Calls, recorder: Recorder) -> None:
    """Wait for the oldest call and record its result."""
    phase, answers = calls.popleft()
    with recorder.spans.span("loop", "wait for the workers"):
        result = answers.result()
    with recorder.spans.span("loop", "log"):
        if phase == "sampling":
            recorder.lap("evaluating")
            if samples := recorder.callbacks.of(Samples):
                samples.take(result)
            return
        recorder.lap(phase, result)
        recorder.record(result)


class Cadence:
    """The times at which the state is saved during training, in seconds."""

    def __init__(self, settings: Checkpoint, now: float) -> None:
        self._settings = settings
        self._saved_at = now

    def is_due(self, step: int, now: float) -> bool:
        """Return whether to save after `step`; if so, `every_minutes` counts from `now`."""
        settings = self._settings
        by_step = settings.every_steps > 0 and step % settings.every_steps == 0
        late = settings.every_minutes > 0 and now - self._saved_at >= 60 * settings.every_minutes
        if by_step or late:
            self._saved_at = now
        return by_step or late
