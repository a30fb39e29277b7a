"""What a failure of a run is, and what is said of it. `training` asks; pure functions."""

from __future__ import annotations

from launcher.cluster.errors import HungError, RayEndedError, WorkerError
from launcher.driver.recorder import DivergedError
from launcher.driver.restart_policy import Failure, Restart
from launcher.plan import Plan


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
