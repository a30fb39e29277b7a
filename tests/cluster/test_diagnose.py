"""What is found out about a worker that does not answer, from a process that stands in for one."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from launcher.cluster.errors import WorkerError
from launcher.cluster.ray.worker import WorkerHandle
from launcher.cluster.ray.worker_actor import machine_id
from launcher.cluster.worker_group import diagnose, relevant_stacks


def test_a_stopped_process_is_diagnosed_with_its_stacks(hanging):
    worker = hanging()
    worker.stop()
    lines = diagnose(worker).splitlines()
    assert lines[0] == (
        f"its process was stopped (SIGSTOP, or a debugger); its stacks (all threads: {worker.log}):"
    )
    assert lines[2:] == [
        '    File "<string>", line 9 in hang',
        '    File "<string>", line 10 in <module>',
    ]


def test_a_process_that_waits_says_where(hanging):
    told = diagnose(hanging())
    assert told.startswith("its process waits")
    assert "in hang" in told


def test_a_process_that_writes_no_stacks_is_diagnosed_by_its_state(hanging, monkeypatch):
    monkeypatch.setattr("launcher.cluster.worker_group._DUMP_SECONDS", 0.5)
    assert diagnose(hanging("deaf")).endswith("; it wrote no stacks on request")


def test_only_our_threads_and_the_main_one_are_told():
    ours = Path(__file__).parents[2] / "launcher" / "train" / "worker.py"
    blocks = [
        'Thread 0x1 (most recent call first):\n  File "/lib/threading.py", line 1 in wait',
        f'Thread 0x2 (most recent call first):\n  File "{ours}", line 2 in step',
        "Thread 0x3 (most recent call first):"
        + "".join(f'\n  File "/x.py", line {n} in f' for n in range(40)),
    ]
    lines = relevant_stacks("\n\n".join(blocks) + "\n")
    assert lines[:2] == blocks[1].splitlines()
    assert lines[2:] == blocks[2].splitlines()[:13]
    assert relevant_stacks("") == []


class Actor:
    """Stands in for Ray's handle of a worker that says where it is: `place`."""

    def __init__(self, place):
        self.location = SimpleNamespace(remote=lambda: place)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        (machine_id(), "worker_0 on 10.0.0.1 (process PID on this machine)"),
        ("another", "worker_0 on 10.0.0.1"),
    ],
)
def test_a_worker_is_known_by_its_machine_whatever_its_address(where, told, monkeypatch, tmp_path):
    """As in a Slurm job, whose first node has the driver and a worker."""
    # The real one may be imported by a session alone, with its settings.
    ray = SimpleNamespace(
        get=lambda place, timeout: place, exceptions=SimpleNamespace(RayError=OSError)
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    worker = WorkerHandle(Actor((where, os.getpid(), "node")), 0, tmp_path / "log", "10.0.0.1")
    process = worker.process()
    assert worker.whereabouts == told.replace("PID", str(os.getpid()))
    if where == "another":
        assert worker.elsewhere
    else:
        assert process == psutil.Process()


DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: Worker
\tip: 10.0.0.1
"""
NODE = "The actor died because its node has died. Node Id: 99d9b024\n"
NODE += "\tthe actor's node was terminated unexpectedly: "


@pytest.mark.parametrize(
    ("ray_says", "told"),
    [
        (
            DIED + NODE + "health check failed due to missing too many heartbeats",
            "worker_0 on 10.0.0.1 is out of reach: Ray's process on its machine has not answered "
            "for a minute: the network to it is cut, or that machine hangs or is down",
        ),
        (
            "the connection broke",
            "worker_0 on 10.0.0.1 is out of reach: the connection to it broke: its process or its "
            "machine failed, or the network to it is cut",
        ),
        (
            DIED + NODE + "Termination of node, GCS noticed that it was gone",
            "worker_0 on 10.0.0.1 died: Ray ended on its machine, which failed or was shut down, "
            "or somebody killed it",
        ),
        (
            DIED + "Worker unexpectedly exits with a connection error code 2.",
            "worker_0 on 10.0.0.1 died: its process was killed by a signal or crashed",
        ),
    ],
)
def test_an_end_is_told_as_what_it_is_as_far_as_that_is_known(ray_says, told, tmp_path):
    worker = WorkerHandle(Actor(None), 0, tmp_path / "log", "10.0.0.1")
    error = worker.death(ray_says)
    assert (error.summary, error.died) == (told, True)


def test_a_worker_that_died_before_it_said_where_it_is_has_no_node(monkeypatch, tmp_path):
    """As the first of a restart's workers, killed at once: the run starts once more."""

    def get(place, timeout):
        raise OSError(DIED)

    exceptions = SimpleNamespace(RayError=OSError)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get, exceptions=exceptions))
    worker = WorkerHandle(Actor(None), 0, tmp_path / "log")
    with pytest.raises(WorkerError, match="worker_0 died"):
        assert worker.node
