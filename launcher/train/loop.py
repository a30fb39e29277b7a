"""The training loop, in the driver: what happens in which order. `run` calls it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher.config.schema import Train
from launcher.train.record import Recorder
from launcher.train.signals import StopSignals

if TYPE_CHECKING:
    from launcher.train.crew import Answers, Crew

IN_FLIGHT = 2  # steps sent ahead of their results: the worker never waits for the driver


def train(
    settings: Train,
    crew: Crew,
    recorder: Recorder,
    stop: StopSignals,
    finished: int,
    save: Callable[[int], None],
) -> None:
    """Train from step `finished` + 1 to `settings.steps`, or until a signal asks for the end.

    `save(step)` is called at the end, where the settings or a signal ask for it and there was a
    step to save. Raises DivergedError, with nothing saved, and WorkerError.
    """
    profiled = profiled_step(settings.steps, finished)
    calls: deque[Answers] = deque()
    step = finished
    while step < settings.steps and not stop.requested:
        step += 1
        calls.append(crew.submit("step", step, step == profiled))
        if settings.eval_every and step % settings.eval_every == 0:
            calls.append(crew.submit("evaluate"))
        while len(calls) >= IN_FLIGHT:
            recorder.record(calls.popleft().result())
    calls.append(crew.submit("flush"))
    while calls:
        recorder.record(calls.popleft().result())
    recorder.log_newest()
    if step > finished and (settings.checkpoint.at_end or stop.requested):
        save(step)


def profiled_step(steps: int, finished: int) -> int:
    """The step that is run task by task to time the stages: the second, when all is warm."""
    return min(finished + 2, steps)
