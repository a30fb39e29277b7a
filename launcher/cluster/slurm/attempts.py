"""Record the attempts of a job's run, and decide whether to try again.

A run that was preempted, or that crashed in a way that may not happen again, continues in its
folder as a new attempt with logs of its own, `logs/attempt_<n>/`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher.base import DamagedError, read_own, write_whole
from launcher.base.reading import read
from launcher.cluster.errors import ClusterError
from launcher.cluster.slurm.allocation import Allocation

PREEMPTED = 75  # the exit code of an attempt that asks to come back
_FILE = "attempt.json"
_KILLED = "killed"  # the exit reason of an attempt that recorded none


@dataclass(frozen=True)
class Attempt:
    """One start of a run.

    Attributes:
        number: the attempt's number, from 0.
        job_id: the id of its job.
        restarts: how often the job had been requeued by then.
        nodes: the names of the nodes on which it ran.
        exit_code: the exit code of the attempt; None while it runs.
        exit_reason: the `exit_reason` of its summary; None while it runs.
        step: the last step that it finished; None while it runs.
        from_step: the step after which it began; None if it ended before it knew.
    """

    number: int
    job_id: str
    restarts: int
    nodes: tuple[str, ...]
    exit_code: int | None = None
    exit_reason: str | None = None
    step: int | None = None
    from_step: int | None = None

    @property
    def came_to_nothing(self) -> bool:
        """Whether the attempt was preempted before its first step."""
        return self.exit_code == PREEMPTED and self.step == self.from_step


def attempt_folder(run: Path, number: int) -> Path:
    """Return the folder with the logs of an attempt."""
    return run / "logs" / f"attempt_{number}"


def begin(
    run: Path,
    allocation: Allocation,
    last_step: int,
    from_step: int | None = None,
) -> Attempt:
    """Record the start of a new attempt; the caller holds the run's folder.

    Args:
        run: the run's folder.
        allocation: the allocation in which the attempt runs.
        last_step: the newest step that any attempt is known to have finished.
        from_step: the step after which this attempt continues.

    Raises:
        ClusterError: the two attempts before were killed without a message, both at `last_step`.
    """
    before = read_attempts(run)
    if before and before[-1].exit_reason is None:
        before[-1] = replace(before[-1], exit_code=1, exit_reason=_KILLED, step=last_step)
        _write(run, before[-1])
    if [(a.exit_reason, a.step) for a in before[-2:]] == [(_KILLED, last_step)] * 2:
        raise ClusterError(
            f"The run was killed twice at step {last_step} without a message of its own, so it is "
            "not started a third time. The job's output and "
            f"{attempt_folder(run, before[-1].number)} may show why; the usual reason is a lack of "
            "memory."
        )
    attempt = _new(run, allocation, from_step)
    _write(run, attempt)
    return attempt


def finish(run: Path, attempt: Attempt, code: int, reason: str, step: int) -> None:
    """Record how an attempt ended."""
    _write(run, replace(attempt, exit_code=code, exit_reason=reason, step=step))


def read_attempts(run: Path) -> list[Attempt]:
    """Return all attempts of a run so far, in their order.

    A damaged record is left out, with a warning.

    Raises:
        OSError: a record cannot be read.
    """
    found = [
        read_own(path / _FILE, functools.partial(_attempt, number))
        for number, path in sorted(_folders(run).items())
    ]
    return [attempt for attempt in found if attempt is not None]


def _folders(run: Path) -> dict[int, Path]:
    """Return the folders of the attempts, by number."""
    folders = (path for path in run.glob("logs/attempt_*") if path.is_dir())
    return {
        int(name[1]): path
        for path in folders
        if (name := re.fullmatch(r"attempt_(0|[1-9][0-9]{0,8})", path.name))
    }


def _attempt(number: int, tree: Any) -> Attempt:
    attempt = read(Attempt, tree)
    if attempt.number != number:
        raise DamagedError(f"number is {attempt.number} in the folder of attempt {number}")
    return attempt


def worth_retrying(attempts: Sequence[Attempt], allocation: Allocation) -> bool:
    """Return whether a run that has just failed should be requeued.

    It should not if its job was requeued often enough, or if the attempt before failed in the same
    way at the same step.
    """
    if allocation.restarts >= allocation.max_requeues:
        return False
    if not attempts or (attempts[-1].job_id, attempts[-1].restarts) != allocation.key:
        return False  # it failed before it recorded an attempt
    *before, last = attempts
    return not before or (before[-1].exit_reason, before[-1].step) != (last.exit_reason, last.step)


def preempted_for_nothing(run: Path, allocation: Allocation) -> bool:
    """Return whether this start of the job and the one before it were preempted too early.

    Too early means before their first step; the next start would be, too. A start that is preempted
    before it recorded an attempt is recorded here.

    Raises:
        OSError: a record cannot be read or written.
    """
    attempts = read_attempts(run)
    if not attempts or (attempts[-1].job_id, attempts[-1].restarts) != allocation.key:
        attempt = replace(_new(run, allocation), exit_code=PREEMPTED, exit_reason="preempted")
        _write(run, attempt)
        attempts.append(attempt)
    last = attempts[-2:]
    return len(last) == 2 and all(
        attempt.came_to_nothing and attempt.job_id == allocation.job_id for attempt in last
    )


def _new(run: Path, allocation: Allocation, from_step: int | None = None) -> Attempt:
    number = max(_folders(run), default=-1) + 1  # also counts attempts whose records are lost
    job_id, restarts, nodes = allocation.job_id, allocation.restarts, allocation.nodes
    return Attempt(number, job_id, restarts, nodes, from_step=from_step)


def _write(run: Path, attempt: Attempt) -> None:
    folder = attempt_folder(run, attempt.number)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / _FILE, json.dumps(asdict(attempt)) + "\n")
