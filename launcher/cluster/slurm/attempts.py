"""The starts of a job's run, one after another: what is kept of each, and whether to try again.

A run that is preempted, or that crashed in a way that may not happen again, comes back to its
folder as a new attempt with logs of its own, `logs/attempt_<n>/`. `launcher.train` begins and ends
attempts; `launcher.submit.job` reads them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher.cluster.errors import ClusterError
from launcher.cluster.slurm.allocation import Allocation
from launcher.files import DamagedError, read_own, write_whole
from launcher.reading import read

PREEMPTED = 75  # the exit code of an attempt that asks to come back
_FILE = "attempt.json"
_KILLED = "killed"  # what an attempt is said to have ended by that said nothing itself


@dataclass(frozen=True)
class Attempt:
    """One start of a run.

    Attributes:
        restarts: of its job by then. nodes: where it ran.
        exit_code, exit_reason, step: how it ended, and after which step; None while it runs.
        from_step: after which step it began; None where it ended before it knew.
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
        """Whether it was preempted before its first step."""
        return self.exit_code == PREEMPTED and self.step == self.from_step


def attempt_folder(run: Path, number: int) -> Path:
    """Where the logs of an attempt are."""
    return run / "logs" / f"attempt_{number}"


def begin(
    run: Path,
    allocation: Allocation,
    last_step: int,
    say: Callable[[str], None],
    from_step: int | None = None,
) -> Attempt:
    """Note the start of a new attempt; the caller holds the run's folder.

    Args:
        last_step: the newest step that any attempt is known to have done.
        say: told in a line of an account that is damaged.
        from_step: the one after which this attempt goes on.

    Raises:
        ClusterError: the two attempts before were killed without a word, both at `last_step`.
    """
    before = read_attempts(run, say)
    if before and before[-1].exit_reason is None:
        before[-1] = replace(before[-1], exit_code=1, exit_reason=_KILLED, step=last_step)
        _write(run, before[-1])
    if [(a.exit_reason, a.step) for a in before[-2:]] == [(_KILLED, last_step)] * 2:
        raise ClusterError(
            f"The run was killed twice at step {last_step}, without a word of its own: it is not "
            f"started a third time. The job's output and {attempt_folder(run, before[-1].number)} "
            "may say why; a lack of memory is the usual reason."
        )
    attempt = _new(run, allocation, from_step)
    _write(run, attempt)
    return attempt


def finish(run: Path, attempt: Attempt, code: int, reason: str, step: int) -> None:
    """Note how an attempt ended."""
    _write(run, replace(attempt, exit_code=code, exit_reason=reason, step=step))


def read_attempts(run: Path, say: Callable[[str], None]) -> list[Attempt]:
    """All attempts of a run so far, in their order; an account that is damaged is left out, and
    said. Raises OSError."""
    found = [
        read_own(path / _FILE, functools.partial(_attempt, number), say)
        for number, path in sorted(_folders(run).items())
    ]
    return [attempt for attempt in found if attempt is not None]


def _folders(run: Path) -> dict[int, Path]:
    """The attempts' folders by their numbers."""
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
    """Whether a run that has just failed is to come back: not when its job came back often
    enough, nor when the attempt before failed in the same way at the same step."""
    if allocation.restarts >= allocation.max_requeues:
        return False
    if not attempts or (attempts[-1].job_id, attempts[-1].restarts) != allocation.key:
        return False  # it failed before it began
    *before, last = attempts
    return not before or (before[-1].exit_reason, before[-1].step) != (last.exit_reason, last.step)


def preempted_for_nothing(run: Path, allocation: Allocation, say: Callable[[str], None]) -> bool:
    """Whether this start of the job, which is preempted, and the one before it both were before
    their first step: the next would be, too. One that ended before it began is noted here. Raises
    OSError."""
    attempts = read_attempts(run, say)
    if not attempts or (attempts[-1].job_id, attempts[-1].restarts) != allocation.key:
        attempt = replace(_new(run, allocation), exit_code=PREEMPTED, exit_reason="preempted")
        _write(run, attempt)
        attempts.append(attempt)
    last = attempts[-2:]
    return len(last) == 2 and all(
        attempt.came_to_nothing and attempt.job_id == allocation.job_id for attempt in last
    )


def _new(run: Path, allocation: Allocation, from_step: int | None = None) -> Attempt:
    number = max(_folders(run), default=-1) + 1  # also where an account of one is lost
    job_id, restarts, nodes = allocation.job_id, allocation.restarts, allocation.nodes
    return Attempt(number, job_id, restarts, nodes, from_step=from_step)


def _write(run: Path, attempt: Attempt) -> None:
    folder = attempt_folder(run, attempt.number)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / _FILE, json.dumps(asdict(attempt)) + "\n")
