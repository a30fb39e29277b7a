"""A tracker that is slow, stuck or gone holds nothing up, and what it does not get is said."""

import sys
import threading

import pytest

from launcher.report.trackers import tracker as queued
from launcher.report.trackers.tracker import QueuedTracker, Tracker


class Gate(Tracker):
    """Records nothing before it is let go on."""

    def __init__(self):
        self.steps, self.ended, self.go_on = [], [], threading.Event()
        self.entered = threading.Event()

    def log(self, step, metrics):
        self.entered.set()
        self.go_on.wait(60)
        self.steps.append(step)

    def finish(self, summary):
        self.ended.append(summary)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.go_on.set()


def test_no_call_waits_and_all_arrive_in_order(gate):
    tracker = QueuedTracker("slow", gate)
    for step in range(1, 1001):
        tracker.log(step, {})
    assert gate.steps == []  # and yet all calls have returned
    gate.go_on.set()
    tracker.finish({"steps": 1000})
    assert gate.steps == [*range(1, 1001)]
    assert gate.ended == [{"steps": 1000}]
    tracker.finish({})
    assert len(gate.ended) == 1


def test_a_full_queue_leaves_the_newest_out_and_says_so(gate, monkeypatch, caplog):
    monkeypatch.setattr(queued, "LONGEST", 10)
    tracker = QueuedTracker("slow", gate)
    tracker.log(1, {})
    assert gate.entered.wait(60)  # it is out of the queue
    for step in range(2, 101):
        tracker.log(step, {})
    gate.go_on.set()
    tracker.finish({})
    assert gate.steps == [*range(1, 12)]
    assert caplog.messages == ["slow: 89 records are left out, as it is too slow"]


def test_a_run_does_not_wait_for_one_that_is_stuck(gate, monkeypatch, caplog):
    monkeypatch.setattr(queued, "FINISH_SECONDS", 0.01)
    tracker = QueuedTracker("stuck", gate)
    tracker.log(1, {})
    tracker.finish({})
    assert gate.ended == []
    [line] = caplog.messages
    assert line.startswith("stuck: it takes over 0.01 s to finish")


def test_a_library_that_exits_ends_its_recording_alone(caplog):
    class Exits(Tracker):
        def log(self, step, metrics):
            sys.exit(255)

    tracker = QueuedTracker("gone", Exits())
    for step in (1, 2):
        tracker.log(step, {})
    tracker.finish({})
    assert caplog.messages == ["gone: 255; the run is no longer recorded there"]
