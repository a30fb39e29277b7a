"""What a training worker tells of one step. Plain data, that is pickled."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from launcher.runtime import Copies, StageTimes
from launcher.schedule import Task
from launcher.train.recordings import Recording


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    Attributes:
        step: the number of the step, from 1.
        metrics: values by the keys of `launcher.report.trackers.tracker`; only those that this
            process knows, as the loss is made on one stage.
        completed_at: when the step was complete, in seconds since the epoch.
        task_seconds: the time of each task here, if the step was profiled.
        copies: digests of the replicas of the state after it, where they are checked: a process's.
        recordings: what was recorded and has not been handed on yet.
    """

    step: int
    metrics: dict[str, float]
    completed_at: float
    task_seconds: dict[Task, float] = field(default_factory=dict)
    copies: tuple[Copies, ...] = ()
    recordings: tuple[Recording, ...] = ()


def with_stage_times(result: StepResult, times: StageTimes) -> StepResult:
    """Return a result with what a profiled step took, stage by stage and task by task."""
    busy = enumerate(times.stage_seconds)
    stages = {f"pipeline/stage_{i}_seconds": seconds for i, seconds in busy}
    return replace(result, metrics=result.metrics | stages, task_seconds=times.task_seconds)
