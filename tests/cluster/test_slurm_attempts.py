"""Which failures are tried again, and what is kept of each attempt."""

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cluster.errors import ClusterError
from launcher.cluster.slurm_allocation import Allocation
from launcher.cluster.slurm_attempts import (
    Attempt,
    begin,
    finish,
    read_attempts,
    worth_retrying,
)

JOB = Allocation("7", 1, 3, ("node1",), 0)
CRASH = Attempt(0, "7", 0, ("node1",), 1, "worker_0 died", 5)


def test_a_crash_is_worth_another_try_but_not_the_same_one_twice() -> None:
    first, again = Attempt(0, "7", 1, ("node1",), 1, "worker_0 died", 5), replace(CRASH, restarts=1)
    assert worth_retrying([first], JOB)
    assert not worth_retrying([CRASH, again], JOB)
    assert worth_retrying([CRASH, replace(again, step=6)], JOB)
    assert worth_retrying([CRASH, replace(again, exit_reason="Ray lost it")], JOB)
    moved = replace(CRASH, exit_code=75, exit_reason="preempted")
    assert worth_retrying([moved, again], JOB)


def test_nothing_is_tried_again_beyond_the_limit_or_before_it_began() -> None:
    again = replace(CRASH, restarts=3)
    assert not worth_retrying([again], replace(JOB, restarts=3))
    assert not worth_retrying([], JOB)
    assert not worth_retrying([CRASH], JOB)  # of the start before


def test_attempts_are_numbered_over_jobs_and_read_back(tmp_path: Path) -> None:
    first = begin(tmp_path, JOB, 0)
    finish(tmp_path, first, 75, "preempted", 12)
    second = begin(tmp_path, replace(JOB, job_id="8", restarts=0), 12)
    assert second.number == 1
    ended, running = read_attempts(tmp_path)
    assert ended == replace(first, exit_code=75, exit_reason="preempted", step=12)
    assert running == second
    assert (tmp_path / "logs" / "attempt_1").is_dir()


def test_a_run_that_is_killed_twice_at_one_step_is_given_up(tmp_path: Path) -> None:
    begin(tmp_path, JOB, 0)
    begin(tmp_path, JOB, 8)
    begin(tmp_path, JOB, 9)  # killed at 8, then at 9
    with pytest.raises(ClusterError, match=r"killed twice at step 9"):
        begin(tmp_path, JOB, 9)
