"""All workers of a run as one: each call goes to all, and their answers are merged.

The workers hold different stages, so each measures its own part of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.base import Advance
from launcher.cluster.ray.worker import Future, WorkerHandle
from launcher.cluster.worker_group import WorkerGroup
from launcher.plan import Plan, measured_bubble
from launcher.runtime import odd_replicas
from launcher.train.step_result import StepResult

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answers:
    """The answers of all workers to one call."""

    futures: tuple[Future, ...]
    workers: Workers

    def result(self, advance: Advance | None = None, limit: float | None = None) -> Any:
        """Return the merged result of a step, or else the first worker's answer.

        Takes and raises the same as `WorkerGroup.gather`.
        """
        return self.workers.merged(self.each(advance, limit))

    def each(self, advance: Advance | None = None, limit: float | None = None) -> list[Any]:
        """Return every worker's answer; raise like `result`."""
        starting = not self.workers.trained
        return self.workers.gather(self.futures, starting=starting, advance=advance, limit=limit)


class Workers(WorkerGroup):
    """The workers of a run, one a host, in the order of the plan's hosts.

    Args:
        handles: the workers' handles.
        plan: the run's plan.
        check: raises if the workers can never answer again.
        timeout: the seconds that an answer may take. Before the first step, see `WorkerGroup`.
        transport: `cluster.transport`, how they exchange arrays.
        servers: the parameter servers, through which alone they exchange sums, if there are any.

    Attributes:
        plan: the run's plan.
        trained: whether a step has ended.
    """

    def __init__(
        self,
        handles: Sequence[WorkerHandle],
        plan: Plan,
        check: Callable[[], None],
        timeout: float,
        transport: str = "auto",
        servers: Sequence[WorkerHandle] = (),
    ) -> None:
        super().__init__(handles, check, timeout, "cluster.step_timeout")
        self.plan, self.trained = plan, False
        self._transport, self._offered = transport, servers

    def connect(self, advance: Advance | None = None) -> None:
        """Form the process group, or connect the workers to the servers; call it first."""
        if self._offered:
            self.use_servers(self._offered)
        else:
            self.join(self._transport, advance)

    def submit(self, method: str, *arguments: Any) -> Answers:
        """Queue a call in every worker and return without waiting."""
        return Answers(self.call(method, *arguments), self)

    def take_first(self, names: Sequence[str]) -> None:
        """Give all workers the first one's values of some arrays of the state."""
        if not self._offered:
            self.submit("take_first", names).result()
            return
        values = self.handles[0].submit("values", names)
        taken = self.call("take_first", names, values.reference)
        self.gather([values, *taken], starting=not self.trained)

    def merged(self, answers: Sequence[Any]) -> Any:
        """Return the merged result of a step, or else the first answer; see `Answers.result`."""
        if not isinstance(answers[0], StepResult):
            return answers[0]
        self.trained = True
        return merged(answers, self.plan)


def compile_everywhere(workers: Workers, begun: Answers, advance: Advance) -> float:
    """Wait until the workers have compiled all programs; return the seconds that it took the first.

    Args:
        workers: the workers.
        begun: their answers to `begin_setup`.
        advance: called with the compiled programs and their total, over all workers.
    """
    totals = begun.each()
    done = [0] * len(totals)
    while unfinished := [d for d, total in zip(done, totals, strict=True) if d < total]:
        advance(sum(done), sum(totals), "programs")
        done = workers.submit("compiled", min(unfinished)).each()
    seconds: float = workers.submit("setup", workers.plan.to_dict()).result()
    return seconds


def create_everywhere(workers: Workers, init_from: str | None) -> None:
    """Have the workers create the first state, the same in all of them.

    Args:
        workers: the workers, with their plan set up.
        init_from: the checkpoint that the model is from, if it is from one.
    """
    odd = odd_replicas(workers.submit("create", init_from).each())
    if not odd:
        return
    names = sorted({each.leaf for each in odd})
    _log.warning(
        f"the processes made different first values of {names[0]}"
        + (f" and {len(names) - 1} more arrays" if len(names) > 1 else "")
        + ", by an init that does not follow from its key alone; all take the first replica's"
    )
    workers.take_first(names)


def merged(parts: Sequence[StepResult], plan: Plan) -> StepResult:
    """Merge the workers' results of one step.

    A metric that one worker alone knows is taken as it is, such as the loss, which is made on one
    stage. The step's time is that of the worker with the loss. Of metrics that several know, such
    as memory and waiting time, the largest is taken.
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
    copies = tuple(each for part in parts for each in part.copies)
    recordings = tuple(each for part in parts for each in part.recordings)
    spent = tuple(each for part in parts for each in part.spent)
    kept = tuple(step for part in parts for step in part.snapshots)
    return StepResult(main.step, metrics, main.completed_at, {}, copies, recordings, spent, kept)
