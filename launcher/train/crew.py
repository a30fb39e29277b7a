"""All workers of a run as one: a call goes to each, and their answers become one answer.

`training` makes it, `loop` calls it. The workers hold different stages, so each measures its own
part of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.cluster.handle import Future, WorkerHandle, gather
from launcher.cluster.peer import introduce
from launcher.plan import Plan, measured_bubble
from launcher.train.worker import StepResult


@dataclass(frozen=True)
class Answers:
    """What the workers answer to one call."""

    futures: tuple[Future, ...]
    plan: Plan

    def result(self) -> Any:
        """The one answer: of steps the merged account, else the first worker's own.

        Raises WorkerError for the first worker that failed.
        """
        answers = gather(self.futures)
        if isinstance(answers[0], StepResult):
            return merged(answers, self.plan)
        return answers[0]


class Crew:
    """One worker a host, in the order of the plan's hosts."""

    def __init__(self, handles: Sequence[WorkerHandle], plan: Plan) -> None:
        self._handles = handles
        self._plan = plan

    def join(self) -> None:
        """Make the processes know one another; the first thing to do."""
        introduce(self._handles)

    def submit(self, method: str, *arguments: Any) -> Answers:
        """Queue a call in every worker and return without waiting."""
        return Answers(
            tuple(handle.submit(method, *arguments) for handle in self._handles), self._plan
        )


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
