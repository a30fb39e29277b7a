"""Failures of a run: classification, reports, and the restart policy.

`failure_of` classifies an exception and `decide` is the restart policy; both are pure functions.
`run_with_restarts` wraps the attempts of a run and acts on them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from launcher.cluster.errors import HungError, RayEndedError, WorkerError
from launcher.driver.record.step_log import DivergedError, SpikeError
from launcher.plan import Plan
from launcher.train import LAG

_SECOND_DELAY, _LONGEST_DELAY = 1.0, 60.0  # seconds
# A worker may be a step ahead of the driver's newest result when it dies.
_SAME_STEP = 1
_MOST_MET = 2  # how often other batches are tried for one spike


@dataclass(frozen=True)
class Failure:
    """A failure that a restart may mend.

    Attributes:
        cause: a few words that identify it.
        step: the newest finished step; with `passes_over`, the step that went wrong.
        report: the full text, one or more lines.
        passes_over: whether the restart must skip the batch of `step`, because it led to values
            that are not finite.
        trained: whether the attempt had finished a step: else it failed while it started.
        spiked: whether the restart must skip the batches that led to a spike at `step`.
    """

    cause: str
    step: int
    report: str = ""
    passes_over: bool = False
    trained: bool = True
    spiked: bool = False

    def is_like(self, other: Failure) -> bool:
        """Return whether `other` is the same failure at the same step, or in the same start."""
        same = (self.cause, self.trained) == (other.cause, other.trained)
        return same and not self.spiked and abs(self.step - other.step) <= _SAME_STEP


@dataclass(frozen=True)
class Restart:
    """The decision to start the run again, after a delay.

    Attributes:
        number: the number of this restart, from 1.
        delay_seconds: how long to wait first.
    """

    number: int
    delay_seconds: float


@dataclass(frozen=True)
class PassedOver:
    """The batches that are passed over, as they have led to spikes.

    Attributes:
        batches: their indices.
        step: the newest spike; a spike that is no later than `LAG` steps after it is the same one.
        times: how often that one was met.
    """

    batches: frozenset[int] = frozenset()
    step: int = -LAG
    times: int = 0

    def after(self, step: int, batches: Iterable[int]) -> PassedOver:
        """Return them after a spike at a step, with the batches that may have led to it."""
        times = self.times + 1 if step <= self.step + LAG else 1
        return PassedOver(self.batches | {*batches}, step, times)

    def ending(self, step: int) -> str:
        """Return why a spike at `step` ends the run, as a clause; "" if it does not."""
        if self.times < _MOST_MET or step > self.step + LAG:
            return ""
        some = ", ".join(map(str, sorted(self.batches)[-_MOST_MET * LAG :]))
        return f"passing over batches {some} has not helped"


class FailedError(Exception):
    """The run failed and is not restarted; the text is the whole report."""


def failure_of(
    error: Exception, step: int, steps: int, plan: Plan, rolls_back: bool
) -> Failure | None:
    """Return the failure behind an exception, or None if a restart cannot help.

    A restart does not help against errors of the program or of the user.

    Args:
        error: what ended the attempt.
        step: the newest finished step.
        steps: the number of steps of the run.
        plan: the run's plan, which says what each worker was doing.
        rolls_back: whether `train.non_finite`, or of a spike `train.spikes`, is "rollback".
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
        case SpikeError() if rolls_back:
            return Failure("a spike", error.step, str(error), spiked=True)
        case DivergedError() if rolls_back:
            return Failure(f"{error.key} not finite", error.step, str(error), passes_over=True)
    return None


def _report(
    error: WorkerError | HungError | RayEndedError, step: int, steps: int, plan: Plan
) -> str:
    """Return the error's text with the progress and the stages concerned after its first line."""
    first, *rest = str(error).splitlines()
    lines = [first, f"  after step {step} of {steps}"]
    if isinstance(error, WorkerError) and not error.is_server:
        lines.append(f"  {error.whereabouts}: {_stages(plan, error.host)}")
    if isinstance(error, HungError):
        lines += [f"  {name}: {_stages(plan, host)}" for host, name in error.workers.items()]
    return "\n".join(lines + rest)


def _stages(plan: Plan, host: int) -> str:
    owned = [str(i) for i, stage in enumerate(plan.stages) if host in stage.hosts]
    many = "s" if len(owned) > 1 else ""
    return f"stage{many} {', '.join(owned)} of {len(plan.stages)}"


def decide(failures: Sequence[Failure], max_restarts: int) -> Restart | str:
    """Return whether to restart after the last of `failures`, which are in order of time.

    A restart is at once where the run has got further than before. Where it has not, the delay
    doubles each time, from one second to a minute.

    Returns:
        The restart, or why there is none, as a clause; "" if restarts are off.
    """
    if not max_restarts:
        return ""
    *before, last = failures
    if before and last.is_like(before[-1]):
        return f"it failed in the same way twice in a row at step {last.step}"
    if len(failures) > max_restarts:
        return f"it was restarted cluster.max_restarts={max_restarts} times"
    pairs = [(old.step, new.step) for old, new in itertools.pairwise(failures)]
    stuck = [*itertools.takewhile(lambda steps: steps[1] <= steps[0], reversed(pairs))]
    delay = min(_SECOND_DELAY * 2 ** (len(stuck) - 1), _LONGEST_DELAY) if stuck else 0.0
    return Restart(len(failures), delay)


def restart_text(
    failure: Failure, restart: Restart, max_restarts: int, checkpoint: int, in_memory: bool = False
) -> str:
    """Return the message of a restart.

    Args:
        failure: its reason.
        restart: the decision.
        max_restarts: the most restarts allowed.
        checkpoint: the step of the newest checkpoint; 0 if there is none.
        in_memory: whether there may be a snapshot of a later step.
    """
    since = f"the checkpoint at step {checkpoint}"
    if not checkpoint:
        since = "step 0, as no checkpoint was saved yet (train.checkpoint says how often)"
    if in_memory:
        since = f"the newest snapshot in memory, or else from {since}"
    when = f"in {restart.delay_seconds:g} s" if restart.delay_seconds else "at once"
    number = f"Restart {restart.number} of at most {max_restarts}"
    return f"{failure.report}\n{number} {when}, from {since}"


def run_with_restarts(
    attempt: Callable[[], None],
    diagnose: Callable[[Exception], Failure | None],
    prepare_restart: Callable[[Failure, Restart], None],
    max_restarts: Callable[[], int],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Call `attempt` until it returns or must not be tried again.

    Args:
        attempt: one attempt at the run.
        diagnose: returns the failure behind an exception of `attempt`, or None if another attempt
            would end in the same way or is not wanted.
        prepare_restart: reports the failure and sets the next attempt up.
        max_restarts: returns the most restarts allowed; it is asked after each failure.
        sleep: waits so many seconds before a restart.

    Raises:
        FailedError: there are no more restarts.
        Exception: what `attempt` raised, if it is no failure in the sense of `diagnose`.
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
            if isinstance(verdict, str):
                ending = f"\nThe run is not restarted: {verdict}." if verdict else ""
                raise FailedError(failure.report + ending) from error
        prepare_restart(failure, verdict)
        sleep(verdict.delay_seconds)
