"""Which errors another start may mend, and what is said of them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.cluster.errors import ClusterError, HungError, RayEndedError, WorkerError
from launcher.driver.incident import failure_of, restart_text
from launcher.driver.recorder import DivergedError
from launcher.driver.restart_policy import GiveUp, Restart, decide

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
    assert isinstance(decide(late, max_restarts=9), GiveUp)
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
    assert restart_text(found, Restart(1, 1.0), 3, 0).endswith(
        "from step 0, as no checkpoint was saved yet (train.checkpoint says how often)"
    )
