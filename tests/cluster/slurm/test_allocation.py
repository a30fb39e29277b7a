"""What a task of a job knows about it: from the environment alone."""

import pytest

from launcher.cluster.errors import ClusterError
from launcher.cluster.slurm.allocation import (
    Allocation,
    find_allocation,
    own_address,
    settled,
)
from launcher.config.compose import load
from launcher.config.errors import ConfigError

TASK = {
    "SLURM_JOB_ID": "123",
    "SLURM_NODEID": "1",
    "LAUNCHER_NODES": "node1\nnode2",
    "LAUNCHER_MAX_REQUEUES": "3",
}
HERE = Allocation("123", 0, 3, ("node1", "node2"), 1)


def test_a_task_is_what_its_environment_says() -> None:
    assert find_allocation(TASK) == HERE
    assert HERE.node == "node2"
    again = find_allocation({**TASK, "SLURM_RESTART_COUNT": "2"})
    assert again is not None
    assert again.key == ("123", 2)


@pytest.mark.parametrize("absent", ["LAUNCHER_NODES", "SLURM_NODEID"])
def test_a_shell_in_an_interactive_job_is_no_task(absent: str) -> None:
    """It has all of Slurm's variables, or what its batch script exported, but not both."""
    assert find_allocation({k: v for k, v in TASK.items() if k != absent}) is None


def test_a_run_without_an_id_has_the_jobs_in_every_attempt() -> None:
    config = load(["cluster=slurm", "cluster.hosts=2", "cluster.gpus=4"])
    assert settled(config, HERE).run.id == "gpt-job-123"
    named = load(["cluster=slurm", "cluster.hosts=2", "cluster.gpus=4", "run.id=mine"])
    assert settled(named, HERE) == named


def test_more_nodes_than_the_settings_say_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster.hosts=1, but job 123 has 2 nodes"):
        settled(load(["cluster=slurm"]), HERE)


def test_fewer_nodes_are_enough_where_a_run_continues_without_a_lost_one() -> None:
    three = ["cluster=slurm", "cluster.hosts=3", "cluster.gpus=6", "run.id=mine"]
    assert settled(load(three), HERE).cluster.hosts == 3
    with pytest.raises(ConfigError, match=r"cluster.hosts=3, but job 123 has 2 nodes"):
        settled(load([*three, "cluster.wait_for_host=off"]), HERE)


def test_the_address_is_that_of_the_interface_or_of_the_way_to_a_peer() -> None:
    assert own_address(HERE, "lo") == "127.0.0.1"
    assert own_address(HERE, None, peer="127.0.0.1") == "127.0.0.1"
    alone = Allocation("123", 0, 3, ("node1",), 0)
    assert own_address(alone, None) == "127.0.0.1"


def test_a_missing_interface_or_way_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ClusterError, match=r"network_interface=ib7 has no IPv4.*which has: .*lo"):
        own_address(HERE, "ib7")
    with pytest.raises(ClusterError, match=r"finds no way to node1.*network_interface"):
        own_address(HERE, None, peer="no.such.host.invalid")
