"""The tasks of a job find one another and end together: two nodes that are both this machine."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launcher.cluster.devices import emulated_pool
from launcher.cluster.errors import ClusterError, WorkerError
from launcher.cluster.session import secret, start
from launcher.cluster.slurm_allocation import Allocation
from launcher.cluster.slurm_meeting import attend, hold
from launcher.config.schema import Cluster, Slurm

SETTINGS = Slurm(emulated=True, network_interface="lo", start_timeout=60)
POOL = emulated_pool(Cluster(kind="emulated", gpus=4, hosts=2))
FIRST = Allocation("42", 0, 0, ("node1", "node2"), 0)
SECOND = Allocation("42", 0, 0, ("node1", "node2"), 1)

# What `launcher` runs on the second node.
TASK = """
import sys
from launcher.__main__ import main
sys.exit(main(["cluster=slurm", "cluster.hosts=2", "cluster.gpus=4", "run.id=run", *sys.argv[1:]]))
"""


@pytest.fixture
def second_node(tmp_path: Path):
    """The process that Slurm would start on the second node."""
    variables = {"SLURM_JOB_ID": "42", "SLURM_NODEID": "1", "LAUNCHER_NODES": "node1 node2"}
    settings = ["cluster.slurm.emulated=true", "cluster.slurm.network_interface=lo"]
    task = subprocess.Popen(
        [sys.executable, "-c", TASK, f"run.dir={tmp_path}", *settings],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        stderr=subprocess.PIPE,
        text=True,
    )
    yield task
    task.kill()
    task.communicate()


def test_each_worker_is_on_its_node_and_all_end_with_the_driver(
    second_node, probe, tmp_path: Path
) -> None:
    with hold(tmp_path / "run", FIRST, SETTINGS, secret()) as meeting:
        (file,) = (tmp_path / "run").glob(".meeting*")
        assert file.stat().st_mode & 0o777 == 0o600
        with start(POOL, tmp_path, meeting) as session:
            workers = session.spawn(probe)
            assert [len(worker.submit("devices").result()) for worker in workers] == [2, 2]
            assert workers[0].submit("variable", "SLURM_NODEID").result() is None
            pids = [worker.submit("place").result()["pid"] for worker in workers]
            there = {p.pid for p in psutil.Process(second_node.pid).children(recursive=True)}
            assert [pid in there for pid in pids] == [False, True]
    assert second_node.wait(30) == 0
    assert not any(psutil.pid_exists(pid) for pid in there)
    assert list((tmp_path / "run").glob(".meeting*")) == []


def test_a_node_that_dies_takes_its_worker_with_it(second_node, probe, tmp_path: Path) -> None:
    with (
        hold(tmp_path / "run", FIRST, SETTINGS, secret()) as meeting,
        start(POOL, tmp_path, meeting) as session,
    ):
        workers = session.spawn(probe)
        assert workers[1].submit("add", 1).result() == 1
        os.mkfifo(tmp_path / "pipe")
        waiting = workers[1].submit("wait", str(tmp_path / "pipe"))
        second_node.kill()
        with pytest.raises(WorkerError, match=r"worker_1\b.* died"):
            waiting.result()
        assert workers[0].submit("add", 1).result() == 1


def test_a_driver_that_ends_early_ends_the_others(second_node, tmp_path: Path) -> None:
    with hold(tmp_path / "run", FIRST, SETTINGS, secret()) as meeting:
        meeting.listener.accept()[0].close()
    assert second_node.wait(30) == 0


def test_nodes_that_do_not_come_are_named(tmp_path: Path) -> None:
    impatient = Slurm(emulated=True, network_interface="lo", start_timeout=1)
    with (
        hold(tmp_path, FIRST, impatient, secret()) as meeting,
        start(POOL, tmp_path, meeting) as session,
        pytest.raises(ClusterError, match=r"Waited 1 s for node2: 1 of 2 nodes did not join"),
    ):
        session.spawn(object)


def test_a_driver_that_does_not_come_is_an_error_that_says_where_it_was_sought(
    tmp_path: Path,
) -> None:
    with pytest.raises(ClusterError, match=r"node2 waited 1 s for the driver on node1: .*meeting"):
        attend(tmp_path, SECOND, Slurm(start_timeout=1))
