"""All workers of a run as one: a call goes to each, and their answers become one answer.

`training` makes it, `loop` calls it. The workers hold different stages, so each measures its own
part of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.cluster.ray.worker import Future, WorkerHandle
from launcher.cluster.worker_group import WorkerGroup
from launcher.plan import Plan, measured_bubble
from launcher.train.worker import StepResult


@dataclass(frozen=True)
class Answers:
    """What the workers answer to one call."""

    futures: tuple[Future, ...]
    workers: Workers

    def result(self) -> Any:
        """The one answer: of steps the merged account, else the first worker's own. Raises like
        `WorkerGroup.gather`."""
        return self.workers.result(self.futures)

    def each(self) -> list[Any]:
        """Every worker's own answer; raises like `result`."""
        return self.workers.answers(self.futures)


class Workers:
    """One worker a host, in the order of the plan's hosts.

    Args:
        check: raises where the workers can never answer again.
        timeout: the seconds that an answer may take; `STARTING` times that up to the first step's.
        transport: `cluster.transport`, the way between them.
    """

    def __init__(
        self,
        handles: Sequence[WorkerHandle],
        plan: Plan,
        check: Callable[[], None],
        timeout: float,
        transport: str = "auto",
    ) -> None:
        self._group = WorkerGroup(handles, check, timeout, "cluster.step_timeout")
        self._plan = plan
        self._transport = transport
        self._trained = False

    def join(self) -> None:
        """Make the processes know one another; the first thing to do."""
        self._group.join(self._transport)

    def submit(self, method: str, *arguments: Any) -> Answers:
        """Queue a call in every worker and return without waiting."""
        return Answers(self._group.submit(method, *arguments), self)

    def result(self, futures: Sequence[Future]) -> Any:
        """See `Answers.result`."""
        answers = self.answers(futures)
        if not isinstance(answers[0], StepResult):
            return answers[0]
        self._trained = True
        return merged(answers, self._plan)

    def answers(self, futures: Sequence[Future]) -> list[Any]:
        """See `Answers.each`."""
        return self._group.gather(futures, starting=not self._trained)


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
