"""Parameter servers: what they make of parts, as objects here and as processes of a real Ray."""

import asyncio
import itertools
import os
import signal
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import psutil
import pytest

from launcher.cluster.devices import emulated_pool
from launcher.cluster.errors import HungError, WorkerError
from launcher.cluster.ray.parameter_server import ExchangeServer
from launcher.cluster.ray.private_ray import PrivateRay
from launcher.cluster.ray.worker import silent_servers
from launcher.cluster.worker_group import WorkerGroup
from launcher.config.cluster import Emulated

PARTS = [np.float32([1e8, 1.0, rank]) for rank in range(3)] + [np.float32([-3e8, 1.0, 3])]


def exchanged(parts, order, axis=None):
    """What a server answers to the workers, whose parts come in this order."""

    async def all_workers():
        server = ExchangeServer(len(parts))
        calls = [server.exchange((0, 0), rank, axis, parts[rank]) for rank in order]
        return await asyncio.gather(*calls)

    return asyncio.run(all_workers())


def test_parts_are_added_in_rank_order_whichever_comes_first():
    expected = ((PARTS[0] + PARTS[1]) + PARTS[2]) + PARTS[3]
    for order in itertools.permutations(range(4)):
        before = [part.copy() for part in PARTS]
        wholes = exchanged(PARTS, order)
        assert all(whole.tobytes() == expected.tobytes() for whole in wholes)
        assert all(np.array_equal(a, b) for a, b in zip(PARTS, before, strict=True))


def test_parts_of_16_bits_are_added_in_32():
    parts = [np.array([256.0, 1.0], ml_dtypes.bfloat16)] + 3 * [
        np.array([0.6, 1.0], ml_dtypes.bfloat16)
    ]
    for whole in exchanged(parts, (2, 0, 3, 1)):
        assert whole.dtype == ml_dtypes.bfloat16
        assert whole.astype(np.float32).tolist() == [258.0, 4.0]  # 256 if each sum were rounded


def test_parts_are_joined_in_rank_order():
    parts = [np.full((2, size), size) for size in (3, 1, 2)]
    for whole in exchanged(parts, (1, 2, 0), axis=1):
        assert whole[0].tolist() == [3, 3, 3, 1, 2, 2]


def test_parts_that_do_not_fit_are_an_error_of_all_workers():
    async def all_workers():
        server = ExchangeServer(2)
        calls = [server.exchange((0, 0), rank, None, np.zeros(rank + 1)) for rank in range(2)]
        return await asyncio.gather(*calls, return_exceptions=True)

    for error in asyncio.run(all_workers()):
        assert str(error) == "the part of worker 1 has the shape [2], those of lower ranks [1]"


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    with PrivateRay(emulated_pool(Emulated(gpus=2, hosts=2)), logs) as session:
        yield session


@pytest.fixture
def group(session, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from adder import Adder

    workers, servers = session.spawn(Adder), session.serve(3, 2)
    group = WorkerGroup(workers, session.check, 3.0, "cluster.step_timeout")
    group.use_servers(servers)
    assert not silent_servers(servers, 60.0)  # whose processes are up
    group.servers = servers
    return group


@pytest.mark.slow
def test_workers_get_the_sums_and_a_server_that_waits_takes_no_processor(group):
    for size in (5, 2**19):  # in the message, and in the store of objects
        wholes, sizes = group.gather(group.call("exchange", size))[0]
        assert wholes == [1001.0, 1e4, np.float32(100100.0)]
        assert sizes == [size, 2 * size, size]
    names = [server.name for server in group.servers]
    assert names == [f"parameter server {n} on host {n % 2}" for n in range(3)]
    processes = [server.process() for server in group.servers]
    waiting = group.handles[0].submit("exchange", 5)  # the other worker gives nothing
    time.sleep(1.0)
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(4.0)
    taken = [sum(p.cpu_times()[:2]) - b for p, b in zip(processes, before, strict=True)]
    assert max(taken) < 0.4, taken  # Ray's own threads are never quite still
    group.gather([waiting, group.handles[1].submit("exchange", 5)])


@pytest.mark.slow
def test_a_server_that_was_killed_is_named(group):
    waiting = group.handles[0].submit("exchange", 5)
    time.sleep(0.5)
    group.servers[1].process().kill()
    with pytest.raises(WorkerError) as raised:
        group.gather([waiting])
    error = raised.value
    assert (error.worker, error.died) == ("parameter server 1 on host 1", True)
    assert error.is_server


@pytest.mark.slow
def test_what_hangs_is_named_a_server_or_the_worker_that_it_waits_for(group):
    stopped = group.handles[1].process()
    stopped.send_signal(signal.SIGSTOP)
    with pytest.raises(HungError) as raised:
        group.gather(group.call("exchange", 5))
    lines = str(raised.value).splitlines()
    assert lines[0] == "no answer from worker_0, worker_1 for 3 s (cluster.step_timeout)"
    assert any(line.startswith("worker_1: its process was stopped") for line in lines)
    assert not any(line.startswith("parameter server") for line in lines)
    assert stopped.status() != psutil.STATUS_STOPPED  # the diagnosis has continued it

    stopped = group.servers[2].process()
    stopped.send_signal(signal.SIGSTOP)
    with pytest.raises(HungError) as raised:
        group.gather(group.call("exchange", 5))
    lines = str(raised.value).splitlines()
    named = "parameter server 2 on host 0"
    assert lines[0] == f"no answer from {named} for 3 s (cluster.step_timeout)"
    assert lines[1].startswith(f"{named}: its process was stopped")


@pytest.mark.slow
def test_nothing_is_left_of_servers(session):
    servers = session.serve(2, 2)
    assert not silent_servers(servers, 60.0)
    deadline = time.monotonic() + 60.0  # where a process is may be told after its first answer
    while None in (processes := [server.process() for server in servers]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    processes[0].send_signal(signal.SIGSTOP)
    before = set(os.listdir("/dev/shm"))
    session.close()
    assert not any(process.is_running() for process in processes)
    assert set(os.listdir("/dev/shm")) <= before
