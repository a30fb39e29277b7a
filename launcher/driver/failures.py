"""Failures of a run: which may pass, what is reported, and when the run is started again.

`failure_of` classifies an exception and `decide` is the restart policy, both pure functions.
`recovering` wraps the attempts of a run and acts on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.cluster.errors import HungError, RayEndedError, WorkerError
from launcher.driver.recorder import DivergedError
from launcher.plan import Plan

_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0  # seconds
# A worker dies a step or two ahead of what the driver has heard of.
_SAME_STEP = 1


@dataclass(frozen=True)
class Failure:
    """What went wrong, in the words that tell it from another failure, and after which finished
    step. `report` is all that is known, in lines. `passes_over`: `step` itself went wrong, and the
    next batch is to be the one after its own."""

    cause: str
    step: int
    report: str = ""
    passes_over: bool = False

    def is_like(self, other: Failure) -> bool:
        """Whether it is the same failure at the same step."""
        return self.cause == other.cause and abs(self.step - other.step) <= _SAME_STEP


@dataclass(frozen=True)
class Restart:
    """Start again, after a while. `number` counts from 1."""

    number: int
    delay_seconds: float


@dataclass(frozen=True)
class GiveUp:
    """End the run; `why` in a clause, "" where it was never to be started again."""

    why: str


class FailedError(Exception):
    """The run failed and is not started again; the text is all that is known."""


def failure_of(
    error: Exception, step: int, steps: int, plan: Plan, rolls_back: bool
) -> Failure | None:
    """What failed, where another start may help; None for what is the program's or the user's.

    Args:
        step: the newest finished one of `steps`. rolls_back: whether `train.non_finite` says so.
    """
    match error:
        case WorkerError() if error.died:
            return Failure(f"{error.worker} died", step, _report(error, step, steps, plan))
        case WorkerError() if error.lost_connection:
            cause = f"{error.worker} lost a connection"
            return Failure(cause, step, _report(error, step, steps, plan))
        case HungError() | RayEndedError():
            cause = "no answer" if isinstance(error, HungError) else "Ray ended"
            return Failure(cause, step, _report(error, step, steps, plan))
        case DivergedError() if rolls_back:
            return Failure(f"{error.key} not finite", error.step, str(error), passes_over=True)
    return None


def _report(
    error: WorkerError | HungError | RayEndedError, step: int, steps: int, plan: Plan
) -> str:
    """The error's own text, after its first line how far the run was and who did what."""
    first, *rest = str(error).splitlines()
    lines = [first, f"  after step {step} of {steps}"]
    if isinstance(error, WorkerError):
        lines.append(f"  {error.whereabouts}: {_stages(plan, error.host)}")
    if isinstance(error, HungError):
        lines += [f"  {name}: {_stages(plan, host)}" for host, name in error.workers.items()]
    return "\n".join(lines + rest)


def _stages(plan: Plan, host: int) -> str:
    held = [str(i) for i, stage in enumerate(plan.stages) if host in stage.hosts]
    many = "s" if len(held) > 1 else ""
    return f"stage{many} {', '.join(held)} of {len(plan.stages)}"


def decide(failures: Sequence[Failure], max_restarts: int) -> Restart | GiveUp:
    """What follows the last of `failures`, which are in their order.

    The delay doubles from restart to restart, from one second to a minute.
    """
    if not max_restarts:
        return GiveUp("")
    *before, last = failures
    if before and last.is_like(before[-1]):
        return GiveUp(f"it failed in the same way twice in a row at step {last.step}")
    if len(failures) > max_restarts:
        return GiveUp(f"it was started again cluster.max_restarts={max_restarts} times")
    delay = min(_FIRST_DELAY * 2 ** len(before), _LONGEST_DELAY)
    return Restart(len(failures), delay)


def restart_text(failure: Failure, restart: Restart, max_restarts: int, checkpoint: int) -> str:
    """What is told of a failure when the run is started again after step `checkpoint`."""
    since = f"the checkpoint at step {checkpoint}"
    if not checkpoint:
        since = "step 0, as no checkpoint was saved yet (train.checkpoint says how often)"
    return (
        f"{failure.report}\n"
        f"Restart {restart.number} of at most {max_restarts} in {restart.delay_seconds:g} s, "
        f"from {since}"
    )


def recovering(
    attempt: Callable[[], None],
    diagnose: Callable[[Exception], Failure | None],
    begin_again: Callable[[Failure, Restart], None],
    max_restarts: Callable[[], int],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Call `attempt` until it returns, or must not be tried again.

    Args:
        diagnose: what an exception of `attempt` is a failure of; None where another attempt would
            end alike, or is not wanted.
        max_restarts: asked after each failure.
        begin_again: says what happened, and makes the next attempt begin where it is to.

    Raises what `attempt` raised where it is no failure, and FailedError.
    """
    failures: list[Failure] = []
    while True:
        try:
            return attempt()
        except Exception as error:
            failure = diagnose(error)
            if failure is None:
                raise
            failures.append(failure)
            verdict = decide(failures, max_restarts())
            if isinstance(verdict, GiveUp):
                ending = f"\nThe run is not started again: {verdict.why}." if verdict.why else ""
                raise FailedError(failure.report + ending) from error
        begin_again(failure, verdict)
        sleep(verdict.delay_seconds)
