"""Waits that have an end: by their time, by what they wait for, by whoever looks in."""

import signal
import threading
import time

import pytest

from launcher.cluster.ray.session import BackgroundCall, RaySession, StartLimit, Waiting


def counted(calls, needed):
    """Is ready when it was asked so often, without waiting."""

    def ready(seconds):
        calls.append(seconds)
        return len(calls) >= needed

    return ready


def test_what_comes_in_time_is_not_spoken_of(caplog):
    caplog.set_level("INFO", "launcher")
    calls = []
    waiting = Waiting(StartLimit(60))
    assert waiting.until(counted(calls, 20), "it")
    assert (len(calls), caplog.messages) == (20, [])


def test_it_is_said_what_is_waited_for_after_ten_seconds_and_then_now_and_then(caplog):
    caplog.set_level("INFO", "launcher")
    assert not Waiting(StartLimit(60)).until(lambda seconds: False, "it")
    assert caplog.messages == [
        "waiting for it: 10 s so far, at most 60 s",
        "waiting for it: 40 s so far, at most 60 s",
    ]


def test_each_wait_of_a_start_has_its_time():
    waiting, calls = Waiting(StartLimit(1.0)), []
    assert waiting.until(counted([], 4), "the first")
    assert not waiting.until(lambda seconds: calls.append(seconds), "the second")
    assert len(calls) == 5
    assert not waiting.until(lambda seconds: calls.append(seconds), "others", seconds=10.0)
    assert len(calls) == 5 + 50


def test_a_wait_begins_anew_when_one_more_is_up():
    told, calls = [], []
    waiting = Waiting(StartLimit(1.0))
    waiting.advance = lambda *far: told.append(far)

    def ready(seconds):
        calls.append(seconds)
        waiting.counts(min(len(calls) // 4, 3), 4, "processes")

    assert not waiting.until(ready, "four of which one never comes")
    assert len(calls) == 3 * 4 + 4  # the call that tells of the third is the first of the last wait
    assert told[-1] == (3, 4, "processes")
    calls.clear()
    assert not waiting.until(ready, "them, once more from none")
    assert len(calls) == 3 * 4 + 4


def test_whoever_looks_in_ends_a_wait():
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Waiting(StartLimit(check=stop)).until(lambda seconds: False, "it")


def test_a_call_aside_goes_on_when_it_is_given_up_and_what_it_raises_comes_out():
    go = threading.Event()
    call = BackgroundCall(lambda: go.wait() and 1 / 0)
    assert not call.ended(0.01)
    go.set()
    assert call.ended(60)
    with pytest.raises(ZeroDivisionError):
        call.result()


def test_a_call_that_must_be_finished_is_whatever_interrupts():
    done = []

    def work():
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.2)
        done.append(True)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            BackgroundCall(work).finish()
    finally:
        signal.signal(signal.SIGINT, before)
    assert done


class Hosts(RaySession):
    """A session on three hosts, of which so many are there."""

    def __init__(self, limit, there):
        super().__init__(limit, None)
        self.calls, self._there = 0, there

    def until_enough(self):
        self._await_hosts(3, self.there, "hosts", self._limit.host_seconds)
        return self.calls

    def there(self):
        self.calls += 1
        return self._there(self.calls)

    def check(self): ...
    def _connect(self): ...
    def _place(self, host): ...
    def _check_started(self, missing, in_time): ...


@pytest.mark.parametrize(
    ("had", "there", "calls"),
    [
        (None, lambda call: 3, 1),
        (3, lambda call: 2, 100),  # twenty seconds, then those are enough
        (3, lambda call: 2 + (call > 9), 10),
        (2, lambda call: 2, 75 + 1),  # one that the run has done without gets 15 seconds
        (2, lambda call: 2 + (call > 9), 10),
        (2, lambda call: 1, 75 + 100),
    ],
)
def test_a_lost_host_has_its_time_to_come_back(monkeypatch, had, there, calls):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(Waiting, "counts", lambda *_: None)
    limit = StartLimit(60, hosts=had, host_seconds=20.0)
    assert Hosts(limit, there).until_enough() == pytest.approx(calls, abs=2)


def test_the_wait_for_a_host_ends_when_whoever_looks_in_says_so(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    def check():
        raise KeyboardInterrupt

    limit = StartLimit(60, check=check, hosts=3, host_seconds=20.0)
    with pytest.raises(KeyboardInterrupt):
        Hosts(limit, lambda call: 2).until_enough()
