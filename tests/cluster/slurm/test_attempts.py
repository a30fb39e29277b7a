"""Which failures are tried again, and what is kept of each attempt."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cluster.errors import ClusterError
from launcher.cluster.slurm.allocation import (
    Allocation,
    Attempt,
    begin,
    finish,
    preempted_for_nothing,
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


def test_a_run_that_is_preempted_twice_before_its_first_step_is_given_up(tmp_path: Path) -> None:
    """Also where it was before it could note that it began."""
    starts = [replace(JOB, restarts=restarts) for restarts in range(6)]
    finish(tmp_path, begin(tmp_path, starts[0], 4, 4), 75, "preempted", 4)
    assert not preempted_for_nothing(tmp_path, starts[0])
    finish(tmp_path, begin(tmp_path, starts[1], 4, 4), 75, "preempted", 5)  # a step further
    assert not preempted_for_nothing(tmp_path, starts[1])
    assert not preempted_for_nothing(tmp_path, starts[2])  # noted only now
    assert preempted_for_nothing(tmp_path, starts[3])
    finish(tmp_path, begin(tmp_path, starts[4], 5, 5), 75, "preempted", 5)
    assert preempted_for_nothing(tmp_path, starts[4])
    assert [attempt.number for attempt in read_attempts(tmp_path)] == list(range(5))
    finish(tmp_path, begin(tmp_path, starts[5], 5, 5), 1, "worker_0 died", 5)  # a crash between
    assert not preempted_for_nothing(tmp_path, replace(JOB, restarts=6))
    assert not preempted_for_nothing(tmp_path, replace(JOB, job_id="8", restarts=0))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'{"number": 0',
        b"[]",
        b'{"number": 0}',
        b'{"number": 1, "job_id": "7", "restarts": 0, "nodes": ["a"]}',
        b'{"number": 0, "job_id": 7, "restarts": 0, "nodes": ["a"]}',
        b'{"number": 0, "job_id": "7", "restarts": 0, "nodes": 3}',
        b"[" * 100_000,
        None,  # a FIFO
    ],
)
def test_a_damaged_account_is_set_aside_and_said_and_its_number_is_not_used_again(
    text: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "logs" / "attempt_0" / "attempt.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(text) if text is not None else os.mkfifo(path)
    attempt = begin(tmp_path, JOB, 0)
    assert attempt.number == 1
    [line] = caplog.messages
    assert line.startswith(f"{path} is damaged and not used: ")
    assert line.endswith("; it is kept as attempt.json.damaged")
    assert read_attempts(tmp_path) == [attempt]
