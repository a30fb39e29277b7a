"""The tasks of a job find one another and end together: two nodes that are both this machine."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ray"))
from listening import ANYWHERE, documented

from launcher.cluster.errors import ClusterError
from launcher.cluster.ray.head import proof
from launcher.cluster.ray.private_ray import secret
from launcher.cluster.slurm.allocation import Allocation
from launcher.cluster.slurm.rendezvous import Answer, ask, join, open_rendezvous, release_nodes
from launcher.config.cluster import Slurm

DRIVER = Path(__file__).with_name("rendezvous_driver.py")
FIRST = Allocation("42", 0, 0, ("node1", "node2"), 0)
SECOND = Allocation("42", 0, 0, ("node1", "node2"), 1)
SECONDS = 120  # that nothing here needs

# What `launcher` runs on the second node.
TASK = """
import sys
from launcher.__main__ import main
sys.exit(main(["cluster=slurm", "cluster.hosts=2", "cluster.gpus=4", "run.id=run", *sys.argv[1:]]))
"""


@pytest.fixture
def second_node(tmp_path: Path):
    """What Slurm would start on the second node; the first one has made the run's folder."""
    (tmp_path / "run").mkdir()
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


def drive(scenario: str, folder: Path, second: int = 0, timeout: int = SECONDS) -> str:
    """Run the first node to its end; returns what it printed."""
    driver = subprocess.run(
        [sys.executable, str(DRIVER), scenario, str(folder), str(second), str(timeout)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * SECONDS,
    )
    assert driver.returncode == 0, driver.stderr
    return driver.stdout


@pytest.mark.stress  # the next one meets, too
def test_each_worker_is_on_its_node_and_all_end_with_the_driver(
    second_node, tmp_path: Path
) -> None:
    """Also where the driver starts a second time, has a thousand files open, and strangers stand
    in the queue."""
    drive("again", tmp_path / "run", second_node.pid)
    assert second_node.wait(SECONDS) == 0


@pytest.mark.slow
def test_the_nodes_listen_where_the_readme_says(second_node, tmp_path: Path) -> None:
    told = drive("ports", tmp_path / "run", second_node.pid).splitlines()
    for line, first in zip(told, (True, False), strict=True):
        listening = {(ip, port): kind for (ip, port), kind in json.loads(line)}
        assert Counter(listening.values()) == documented("nodes", 1, first=first)
        everywhere = Counter(kind for (ip, _), kind in listening.items() if ip in ANYWHERE)
        assert everywhere <= documented("nodes", 1, first=first, purpose="Ray")
    assert second_node.wait(SECONDS) == 0


@pytest.mark.slow
def test_a_node_that_dies_takes_its_worker_with_it(second_node, tmp_path: Path) -> None:
    told = drive("dies", tmp_path / "run", second_node.pid)
    assert told.startswith("worker_1")
    assert "died: Ray ended on its machine" in told or "is out of reach: the connection" in told


@pytest.mark.stress
def test_of_a_node_that_falls_silent_nobody_says_that_it_died(second_node, tmp_path: Path) -> None:
    told = drive("silent", tmp_path / "run", second_node.pid)
    assert told.startswith("worker_1")
    assert "is out of reach: Ray's process on its machine has not answered for a minute" in told
    assert second_node.wait(SECONDS) == 0


def test_a_driver_with_nothing_to_do_lets_the_others_go(second_node, tmp_path: Path) -> None:
    """They may look for it later than it has found that out."""
    settings = Slurm(emulated=True, network_interface="lo", start_timeout=SECONDS)
    with open_rendezvous(tmp_path / "run", FIRST, settings, secret()) as rendezvous:
        release_nodes(rendezvous)
    assert second_node.wait(SECONDS) == 0


def test_a_driver_that_ends_early_ends_the_others(second_node, tmp_path: Path) -> None:
    settings = Slurm(emulated=True, network_interface="lo")
    with open_rendezvous(tmp_path / "run", FIRST, settings, secret()) as rendezvous:
        rendezvous.listener.accept()[0].close()
    assert second_node.wait(SECONDS) == 0
    assert not psutil.pid_exists(second_node.pid)


@pytest.mark.parametrize("part", [1, 0.5])
def test_what_the_driver_says_counts_once_it_is_whole(part: float) -> None:
    """Of half an answer the driver was killed."""
    body = b'{"ray": "10.0.0.1:6379", "logs": "/run/logs"}'

    def answer() -> None:
        nonce = theirs.recv(4096).partition(b" ")[0]
        line = proof(b"token", b"driver", nonce, body) + b" " + body + b"\n"
        theirs.sendall(line[: int(part * len(line))])
        theirs.close()

    ours, theirs = socket.socketpair()
    threading.Thread(target=answer).start()
    with ours:
        assert ask(ours, "token") == (Answer("10.0.0.1:6379", "/run/logs") if part == 1 else None)


@pytest.mark.slow
def test_nodes_that_do_not_come_are_named(tmp_path: Path) -> None:
    told = drive("absent", tmp_path, timeout=1)
    assert told.startswith("Waited 1 s for node2: 1 of 2 nodes did not join Ray.")


def test_a_driver_that_does_not_come_is_an_error_that_says_where_it_was_sought(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ClusterError, match=r"node2 waited 1 s for the driver on node1: .*rendezvous"
    ):
        join(tmp_path, SECOND, Slurm(start_timeout=1))


@pytest.mark.parametrize("whose", ["readable", "another's", "a link"])
def test_a_rendezvous_that_others_may_have_made_is_not_joined(whose: str, tmp_path: Path) -> None:
    with open_rendezvous(tmp_path, FIRST, Slurm(network_interface="lo"), "secret"):
        (file,) = tmp_path.glob(".rendezvous*")
        if whose == "readable":
            file.chmod(0o644)
        elif whose == "a link":
            file.symlink_to(file.rename(tmp_path / "elsewhere"))
        elif os.getuid() == 0:
            os.chown(file, 65534, 65534)
        else:
            pytest.skip("only root can give a file away")
        with pytest.raises(ClusterError, match=r"nobody answered \(.*(other users|regular file)\)"):
            join(tmp_path, SECOND, Slurm(start_timeout=1))


@pytest.mark.parametrize("copied", ["", "0" * 64 + " "])
def test_who_answers_in_the_driver_s_place_is_not_believed_and_learns_nothing(
    copied: str, tmp_path: Path
) -> None:
    heard = []

    def stranger() -> None:
        caller = rendezvous.listener.accept()[0]
        heard.append(caller.recv(4096))
        caller.sendall(f'{copied}{{"ray": "127.0.0.1:1", "logs": "/"}}\n'.encode())

    with open_rendezvous(tmp_path, FIRST, Slurm(network_interface="lo"), secret()) as rendezvous:
        threading.Thread(target=stranger).start()
        connection, token = join(tmp_path, SECOND, Slurm())
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        with connection, pytest.raises(ClusterError, match="does not know the run's secret"):
            ask(connection, token)
    assert token == secret()
    assert token.encode() not in heard[0]
