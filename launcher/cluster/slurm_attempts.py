"""The starts of a job's run, one after another: what is kept of each, and whether to try again.

A run that is preempted, or that crashed in a way that may not happen again, comes back to its
folder as a new attempt with logs of its own, `logs/attempt_<n>/`. `launcher.train` begins and ends
attempts; `launcher.submit` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launcher.cluster.errors import ClusterError
from launcher.cluster.slurm_allocation import Allocation

_FILE = "attempt.json"
_KILLED = "killed"  # what an attempt is said to have ended by that said nothing itself


@dataclass(frozen=True)
class Attempt:
    """One start of a run.

    Attributes:
        restarts: of its job by then. nodes: where it ran.
        exit_code, exit_reason, step: how it ended, and after which step; None while it runs.
    """

    number: int
    job_id: str
    restarts: int
    nodes: tuple[str, ...]
    exit_code: int | None = None
    exit_reason: str | None = None
    step: int | None = None


def attempt_folder(run: Path, number: int) -> Path:
    """Where the logs of an attempt are."""
    return run / "logs" / f"attempt_{number}"


def begin(run: Path, allocation: Allocation, last_step: int) -> Attempt:
    """Note the start of a new attempt; the caller holds the run's folder.

    Args:
        last_step: the newest step that any attempt is known to have done.

    Raises:
        ClusterError: the two attempts before were killed without a word, both at `last_step`.
    """
    before = read_attempts(run)
    if before and before[-1].exit_reason is None:
        before[-1] = replace(before[-1], exit_code=1, exit_reason=_KILLED, step=last_step)
        _write(run, before[-1])
    if [(a.exit_reason, a.step) for a in before[-2:]] == [(_KILLED, last_step)] * 2:
        raise ClusterError(
            f"The run was killed twice at step {last_step}, without a word of its own: it is not "
            f"started a third time. The job's output and {attempt_folder(run, len(before) - 1)} "
            "may say why; a lack of memory is the usual reason."
        )
    attempt = Attempt(len(before), allocation.job_id, allocation.restarts, allocation.nodes)
    attempt_folder(run, attempt.number).mkdir(parents=True, exist_ok=True)
    _write(run, attempt)
    return attempt


def finish(run: Path, attempt: Attempt, code: int, reason: str, step: int) -> None:
    """Note how an attempt ended."""
    _write(run, replace(attempt, exit_code=code, exit_reason=reason, step=step))


def read_attempts(run: Path) -> list[Attempt]:
    """All attempts of a run so far, in their order."""
    files = run.glob(f"logs/attempt_*/{_FILE}")
    stored = [json.loads(file.read_text()) for file in files]
    attempts = [Attempt(**{**fields, "nodes": tuple(fields["nodes"])}) for fields in stored]
    return sorted(attempts, key=lambda attempt: attempt.number)


def worth_retrying(attempts: Sequence[Attempt], allocation: Allocation) -> bool:
    """Whether a run that has just failed is to come back: not when its job came back often
    enough, nor when the attempt before failed in the same way at the same step."""
    if allocation.restarts >= allocation.max_requeues:
        return False
    if not attempts or (attempts[-1].job_id, attempts[-1].restarts) != allocation.key:
        return False  # it failed before it began
    *before, last = attempts
    return not before or (before[-1].exit_reason, before[-1].step) != (last.exit_reason, last.step)


def _write(run: Path, attempt: Attempt) -> None:
    path = attempt_folder(run, attempt.number) / _FILE
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(attempt)) + "\n")
    partial.replace(path)
