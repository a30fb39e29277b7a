"""What is said of workers that do not answer, of which processes stand in for two."""

import time
from types import SimpleNamespace

import pytest

from launcher.cluster import worker_group
from launcher.cluster.errors import HungError
from launcher.cluster.worker_group import WorkerGroup


def test_the_one_that_stopped_is_examined_though_it_answered_before(hanging, monkeypatch):
    """The other one waits for it, and is the only one that owes an answer."""
    monkeypatch.setattr(worker_group, "WATCH_SECONDS", 1.0)
    first, second = workers = hanging(), hanging()
    first.stop()
    both = WorkerGroup(workers, lambda: None, 1.0, "cluster.step_timeout")
    watch = both.watch(starting=False)
    with pytest.raises(HungError) as raised:
        watch([second])
    lines = str(raised.value).splitlines()
    assert lines[0] == "no answer from worker_1 for 1 s (cluster.step_timeout)"
    assert lines[1].startswith("worker_1: its process waits")
    assert any(
        line.startswith("worker_0, which answered before: its process was stopped")
        for line in lines
    )
    assert raised.value.workers == {w.host: w.whereabouts for w in workers}


def test_clocks_are_read_in_the_middle_of_round_trips(monkeypatch):
    """A clock that is ahead by two seconds, of a worker that takes its time to answer."""
    monkeypatch.setattr(worker_group, "gather", lambda futures, watch, servers: futures)

    def submit(method):
        assert method == "clock"
        time.sleep(0.005)
        read = time.time_ns()
        time.sleep(0.005)
        return read + 2_000_000_000

    handle = SimpleNamespace(name="worker_0", host=0, submit=submit)
    (clock,) = WorkerGroup([handle], lambda: None, 10.0, "cluster.step_timeout").clocks()
    assert clock.uncertainty >= 5_000_000
    assert abs(clock.offset - 2_000_000_000) <= clock.uncertainty
