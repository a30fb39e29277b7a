"""All workers of a run as one: a call goes to each, and their answers become one answer.

`training` makes it, `loop` calls it. The workers hold different stages, so each measures its own
part of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.cluster.errors import HungError, WorkerError
from launcher.cluster.examine import examine
from launcher.cluster.handle import WATCH_SECONDS, Future, WorkerHandle, gather
from launcher.cluster.peer import introduce
from launcher.plan import Plan, measured_bubble
from launcher.train.worker import StepResult

STARTING = 10  # up to the first step's end, which compiles and connects, all may take this long
_RAY_SECONDS = 4.0  # in which Ray's end is noticed, of which a worker's may be the first sign


@dataclass(frozen=True)
class Answers:
    """What the workers answer to one call."""

    futures: tuple[Future, ...]
    crew: Crew

    def result(self) -> Any:
        """The one answer: of steps the merged account, else the first worker's own.

        Raises WorkerError for the first worker that failed, HungError where none answers for too
        long, and RayEndedError.
        """
        return self.crew.result(self.futures)

    def each(self) -> list[Any]:
        """Every worker's own answer; raises like `result`."""
        return self.crew.answers(self.futures)


class Crew:
    """One worker a host, in the order of the plan's hosts.

    Args:
        check: raises where the workers can never answer again.
        timeout: the seconds that an answer may take; `STARTING` times that up to the first step's.
    """

    def __init__(
        self,
        handles: Sequence[WorkerHandle],
        plan: Plan,
        check: Callable[[], None],
        timeout: float,
    ) -> None:
        self._handles = handles
        self._plan = plan
        self._check = check
        self._timeout = timeout
        self._trained = False

    def join(self) -> None:
        """Make the processes know one another; the first thing to do."""
        introduce(self._handles, self._watch())

    def submit(self, method: str, *arguments: Any) -> Answers:
        """Queue a call in every worker and return without waiting."""
        return Answers(tuple(handle.submit(method, *arguments) for handle in self._handles), self)

    def result(self, futures: Sequence[Future]) -> Any:
        """See `Answers.result`."""
        answers = self.answers(futures)
        if not isinstance(answers[0], StepResult):
            return answers[0]
        self._trained = True
        return merged(answers, self._plan)

    def answers(self, futures: Sequence[Future]) -> list[Any]:
        """See `Answers.each`."""
        try:
            return gather(futures, self._watch())
        except WorkerError as error:
            if error.died or error.lost_connection:
                self._blame_ray()
            raise

    def _watch(self) -> Callable[[list[WorkerHandle]], None]:
        """What looks after one wait. It counts its own calls, not the clock: when this process was
        stopped for a while, so may have been the workers."""
        limit = self._timeout if self._trained else STARTING * self._timeout
        calls = 0

        def watch(waiting: list[WorkerHandle]) -> None:
            nonlocal calls
            calls += 1
            self._check()
            for handle in self._handles:
                handle.process()  # to be known when it is needed
            if calls * WATCH_SECONDS >= limit:
                raise self._hung(waiting, limit)

        return watch

    def _hung(self, waiting: list[WorkerHandle], seconds: float) -> HungError:
        """All are examined: one that answered may be stopped since, and the others wait for it."""
        names = ", ".join(handle.name for handle in waiting)
        told = f"no answer from {names} for {seconds:g} s (cluster.step_timeout)"
        found = []
        for handle in sorted(self._handles, key=lambda handle: handle not in waiting):
            since = "" if handle in waiting else ", which answered before"
            found.append(f"{handle.name}{since}: {examine(handle)}")
        where = {handle.host: handle.whereabouts for handle in self._handles}
        return HungError("\n".join([told, *found]), where)

    def _blame_ray(self) -> None:
        """Raise RayEndedError where Ray ends as well: then the workers only went with it."""
        deadline = time.monotonic() + _RAY_SECONDS
        while time.monotonic() < deadline:
            self._check()
            time.sleep(0.1)


def merged(parts: Sequence[StepResult], plan: Plan) -> StepResult:
    """One step as all workers saw it.

    What one worker alone knows (the loss is made on one stage) is taken from it, with its times;
    memory and waiting are the largest of any; stages' times stand beside one another.
    """
    main = next(part for part in parts if "train/loss" in part.metrics)
    metrics = dict(main.metrics)
    for part in parts:
        for name, value in part.metrics.items():
            known = name in metrics and name != "perf/step_seconds"
            metrics[name] = max(metrics[name], value) if known else metrics.get(name, value)
    seconds = {task: s for part in parts for task, s in part.task_seconds.items()}
    if seconds:
        metrics["pipeline/bubble_fraction"] = measured_bubble(plan, seconds)
    return StepResult(main.step, metrics, main.completed_at)
