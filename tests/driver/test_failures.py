"""Which failures another start may mend, what is reported, and when a run is started again."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.cluster.errors import ClusterError, HungError, RayEndedError, WorkerError
from launcher.driver.failures import (
    FailedError,
    Failure,
    PassedOver,
    Restart,
    decide,
    failure_of,
    restart_text,
    run_with_restarts,
)
from launcher.driver.record.step_log import DivergedError

PLAN = SimpleNamespace(stages=[SimpleNamespace(hosts=hosts) for hosts in [(0,), (0,), (1,)]])


def worker_error(log=Path("/nowhere"), **fields):
    where = "worker_1 (process 7 on this machine)"
    return WorkerError("worker_1", "as it was told", log, host=1, whereabouts=where, **fields)


def failure(error, rolls_back=False):
    return failure_of(error, 12, 40, PLAN, rolls_back)


def test_a_dead_worker_is_told_with_its_place_and_its_last_lines(tmp_path):
    log = tmp_path / "worker_1.log"
    log.write_text("first words\nlast words\n")
    found = failure(worker_error(log, died=True))
    assert (found.cause, found.step) == ("worker_1 died", 12)
    assert found.report == (
        "worker_1 died: as it was told\n"
        "  after step 12 of 40\n"
        "  worker_1 (process 7 on this machine): stage 2 of 3\n"
        f"The last lines of {log}:\n"
        "  first words\n"
        "  last words"
    )


def test_hung_workers_are_told_each_with_its_stages_and_stacks():
    where = {0: "worker_0 (process 6 on this machine)", 1: "worker_1"}
    told = "no answer from worker_0, worker_1 for 5 s (cluster.step_timeout)\nworker_0: it waits"
    assert failure(HungError(told, where)).report.splitlines() == [
        "no answer from worker_0, worker_1 for 5 s (cluster.step_timeout)",
        "  after step 12 of 40",
        "  worker_0 (process 6 on this machine): stages 0, 1 of 3",
        "  worker_1: stage 2 of 3",
        "worker_0: it waits",
    ]


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RayEndedError("Ray ended: why"), "Ray ended"),
        *(
            (WorkerError("worker_0", told, Path(), error_type="X"), "worker_0 lost a connection")
            for told in (
                "UNAVAILABLE: socket closed",
                "INTERNAL: Error dispatching computation: SocketServer: Connection closed recv()",
                "INTERNAL: Gloo all-reduce failed:\n[pair.cc:534] Connection closed by peer [::1]",
            )
        ),
    ],
)
def test_what_another_start_may_mend(error, cause):
    assert failure(error).cause == cause


@pytest.mark.parametrize(
    "error",
    [
        worker_error(error_type="ValueError"),
        worker_error(error_type="JaxRuntimeError"),
        WorkerError("worker_1", "the store says: Connection closed", Path(), error_type="KeyError"),
        DivergedError("train/loss", float("nan"), 13),
        ClusterError("no folder for sockets"),
        OSError(28, "No space left on device"),
    ],
)
def test_what_another_start_would_only_repeat(error):
    assert failure(error) is None


def test_a_start_that_is_late_twice_is_not_tried_a_third_time():
    """Whatever it was that did not come up."""
    late = [
        failure(RayEndedError(f"{what} within 180 s (cluster.start_timeout)."))
        for what in ("Ray did not come up", "Ray did not start the processes of worker_0")
    ]
    assert isinstance(decide(late[:1], max_restarts=9), Restart)
    assert isinstance(decide(late, max_restarts=9), str)
    assert "(cluster.start_timeout)" in late[1].report


def test_a_roll_back_counts_by_the_step_that_went_wrong():
    found = failure(DivergedError("train/loss", float("nan"), 13), rolls_back=True)
    assert (found.cause, found.step) == ("train/loss not finite", 13)
    assert found.passes_over


def test_a_restart_says_from_where():
    found = failure(RayEndedError("Ray ended: why"))
    assert restart_text(found, Restart(2, 2.0), 3, 10) == (
        "Ray ended: why\n  after step 12 of 40\n"
        "Restart 2 of at most 3 in 2 s, from the checkpoint at step 10"
    )
    assert restart_text(found, Restart(1, 0.0), 3, 0).endswith(
        "Restart 1 of at most 3 at once, from step 0, as no checkpoint was saved yet "
        "(train.checkpoint says how often)"
    )
    assert restart_text(found, Restart(1, 1.0), 3, 10, in_memory=True).endswith(
        "from the newest snapshot in memory, or else from the checkpoint at step 10"
    )


def failures(*pairs):
    return [Failure(cause, step) for cause, step in pairs]


def test_the_delay_doubles_up_to_a_minute_where_a_run_gets_no_further():
    told = failures(*((f"worker_{i} died", 7) for i in range(9)))
    delays = [decide(told[: n + 1], max_restarts=10) for n in range(9)]
    assert delays == [
        Restart(n + 1, s) for n, s in enumerate([0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0])
    ]
    told += failures(("worker_1 died", 8))
    assert decide(told, max_restarts=10) == Restart(10, 0.0)


@pytest.mark.parametrize("step", [6, 7, 8])
def test_the_same_failure_at_the_same_step_twice_in_a_row_is_the_last(step):
    verdict = decide(failures(("worker_0 died", 7), ("worker_0 died", step)), max_restarts=9)
    assert verdict == f"it failed in the same way twice in a row at step {step}"


@pytest.mark.parametrize(
    "told",
    [
        [("worker_0 died", 7), ("worker_0 died", 9)],  # at another step
        [("worker_0 died", 7), ("worker_1 died", 7)],  # another failure
        [("Ray ended", 7), ("worker_0 died", 7), ("Ray ended", 7)],  # not in a row
    ],
)
def test_other_failures_are_not_the_same(told):
    assert isinstance(decide(failures(*told), max_restarts=9), Restart)


def test_a_recovery_that_fails_is_not_the_failure_that_it_recovers_from():
    """Only where it fails twice is nothing gained by another."""
    told = [Failure("worker_0 died", 7, trained=trained) for trained in (True, False, False)]
    assert decide(told[:2], max_restarts=9) == Restart(2, 1.0)
    assert isinstance(decide(told, max_restarts=9), str)


def test_there_is_an_end_to_restarts():
    told = failures(*((f"worker_{i} died", i * 10) for i in range(3)))
    assert decide(told, max_restarts=3) == Restart(3, 0.0)
    assert decide(told, max_restarts=2) == "it was restarted cluster.max_restarts=2 times"
    assert decide(told[:1], max_restarts=0) == ""


def run(outcomes, max_restarts=3, diagnose=lambda error: Failure(str(error), 1, f"{error}!")):
    """`run_with_restarts` over attempts that end with `outcomes`, errors or None; what was done."""
    done, remaining = [], iter(outcomes)

    def attempt():
        done.append("attempt")
        if (error := next(remaining)) is not None:
            raise error

    def prepare_restart(failure, restart):
        done.append((failure.cause, restart.number))

    run_with_restarts(attempt, diagnose, prepare_restart, lambda: max_restarts, done.append)
    return done


def test_a_run_is_tried_until_it_succeeds():
    outcomes = [OSError("a"), OSError("b"), None]
    assert run(outcomes) == ["attempt", ("a", 1), 0.0, "attempt", ("b", 2), 1.0, "attempt"]


def test_what_is_no_failure_ends_it_as_it_is():
    error = ValueError("the user's")
    with pytest.raises(ValueError, match="the user's") as raised:
        run([error], diagnose=lambda error: None)
    assert raised.value is error


def test_the_end_says_what_failed_and_why_it_is_the_end():
    with pytest.raises(FailedError) as raised:
        run([OSError("a"), OSError("a")])
    assert str(raised.value) == (
        "a!\nThe run is not restarted: it failed in the same way twice in a row at step 1."
    )
    with pytest.raises(FailedError, match=r"^a!$"):
        run([OSError("a")], max_restarts=0)


def test_an_interrupt_is_not_recovered_from():
    with pytest.raises(KeyboardInterrupt):
        run([KeyboardInterrupt()])


def test_a_spike_that_is_met_again_gets_other_batches_once():
    first = PassedOver().after(30, [27, 28, 29])
    again = first.after(33, [33, 34, 35])
    assert first.ending(33) == again.ending(37) == ""  # after 36 it is another spike
    assert again.batches == {27, 28, 29, 33, 34, 35}
    ending = "passing over batches 27, 28, 29, 33, 34, 35 has not helped"
    assert again.ending(31) == again.ending(36) == ending
    assert again.after(40, [45, 46, 47]).ending(41) == ""
