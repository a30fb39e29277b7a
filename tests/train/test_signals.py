"""Ctrl-C and SIGTERM: at once outside training, after the step inside it."""

import os
import signal

import pytest

from launcher.train.signals import ENDINGS, StopSignals


def send(signum):
    os.kill(os.getpid(), signum)
    signal.sigtimedwait([], 0)  # give the interpreter a moment to run the handler


@pytest.fixture(autouse=True)
def not_under_nohup():
    """There a closed terminal ends nothing."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("signum", "code", "reason"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 75, "preempted"),
        (signal.SIGHUP, 75, "preempted"),
        (signal.SIGUSR1, 75, "preempted"),
        (signal.SIGUSR2, 75, "preempted"),
    ],
)
def test_outside_training_a_signal_leaves_at_once(signum, code, reason):
    with StopSignals() as stop, pytest.raises(KeyboardInterrupt):
        send(signum)
    assert stop.ending == (code, reason)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_in_training_the_first_signal_is_only_noted(signum):
    with StopSignals() as stop, stop.noted():
        assert stop.requested is None
        send(signum)
        assert stop.requested is signum


def test_a_second_ctrl_c_leaves_at_once_but_the_scheduler_may_repeat_itself():
    with StopSignals() as stop, stop.noted():
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert stop.ending == (75, "preempted")  # why it was told to stop in the first place


def test_after_training_a_signal_leaves_at_once_again():
    with StopSignals() as stop:
        with stop.noted():
            pass
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_the_handlers_of_before_come_back():
    before = [signal.getsignal(s) for s in ENDINGS]
    with StopSignals():
        assert [signal.getsignal(s) for s in ENDINGS] != before
    assert [signal.getsignal(s) for s in ENDINGS] == before


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
