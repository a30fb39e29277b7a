"""Ctrl-C and SIGTERM: at once where nothing has begun, through whatever swallows them where it
only computes, and in good order elsewhere."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time

import pytest

from launcher.stop import ENDINGS, Stop


def send(signum):
    os.kill(os.getpid(), signum)
    signal.sigtimedwait([], 0)  # give the interpreter a moment to run the handler


@pytest.fixture(autouse=True)
def not_under_nohup():
    """There a closed terminal ends nothing."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def said():
    return []


@pytest.mark.parametrize("signum", ENDINGS)
def test_work_that_only_computes_is_left_at_once(signum, capfd):
    with Stop() as stop:
        with pytest.raises(KeyboardInterrupt), stop.interruptible():
            send(signum)
        told = (130, "interrupted") if signum is signal.SIGINT else (75, "preempted")
        assert stop.ending == told
    assert capfd.readouterr() == ("launcher: stopping\n", "")


def run(program, *signals):
    """A process of its own that gets the signals as soon as it has written a line."""
    command = [sys.executable, "-c", "import os, signal, time\n" + program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    for signum in signals:
        process.send_signal(signum)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


BEGUN = "from launcher.stop import Stop\nstop = Stop().__enter__()\n"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_where_nothing_has_begun_no_exception_can_be_swallowed(signum, code):
    program = BEGUN + (
        "try:\n    print(flush=True)\n    time.sleep(600)\n"
        "except BaseException:\n    print('caught')\n"
    )
    assert run(program, signum) == (code, "launcher: stopping\n", "")


def interruptible(stop, work):
    with stop.interruptible():
        work()


def swallowed_by_a_finalizer():
    """As garbage collection calls them; Python only reports what they raise."""

    class Finalized:
        def __del__(self):
            send(signal.SIGINT)

    Finalized()
    gc.collect()


def swallowed_by_a_handler():
    with contextlib.suppress(BaseException):
        send(signal.SIGINT)


@pytest.mark.parametrize("swallow", [swallowed_by_a_finalizer, swallowed_by_a_handler])
def test_an_interrupt_that_was_swallowed_comes_again(swallow, capfd):
    def work():
        swallow()
        time.sleep(600)

    with Stop() as stop, pytest.raises(KeyboardInterrupt):
        interruptible(stop, work)
    assert capfd.readouterr().err == ""


def test_an_interrupt_that_became_another_error_is_one_still(capfd):
    """As imports of extensions make an ImportError of it."""

    def work():
        try:
            send(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ImportError("no extension") from error

    with Stop() as stop, pytest.raises(KeyboardInterrupt):
        interruptible(stop, work)
    assert capfd.readouterr().err == ""


def test_an_error_of_the_work_itself_comes_out_as_it_is():
    with Stop() as stop, pytest.raises(ImportError), stop.interruptible():
        raise ImportError("no extension")


def test_code_below_python_is_left_with_the_process():
    """It looks at no signal: here it waits for a lock that it holds."""
    program = BEGUN + (
        "import ctypes, threading\n"
        "libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "libc.pthread_spin_init(lock, 0)\n"
        "libc.pthread_spin_lock(lock)\n"
        "with stop.interruptible():\n"
        "    threading.Timer(1, print, kwargs={'flush': True}).start()\n"
        "    libc.pthread_spin_lock(lock)\n"
    )
    assert run(program, signal.SIGTERM) == (75, "launcher: stopping\n", "")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_what_must_end_in_good_order_is_told(signum, said):
    with Stop() as stop, stop.heeded(said.append, "saving", until="done"):
        assert stop.requested is None
        send(signum)
        assert stop.requested is signum
        stop.check()
    assert said == ["launcher: stopping: saving"]


@pytest.mark.parametrize("until", ["checked", "now"])
def test_a_wait_is_ended_by_its_next_look_or_at_once(until, said):
    with Stop() as stop, stop.heeded(said.append, until=until):
        stop.check()
        if until == "checked":
            send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            stop.check() if until == "checked" else send(signal.SIGTERM)
    assert said == ["launcher: stopping"]


def test_a_second_ctrl_c_leaves_at_once_but_the_scheduler_may_repeat_itself(said):
    with Stop() as stop, stop.heeded(said.append, until="done"):
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert stop.ending == (75, "preempted")  # why it was told to stop in the first place


def test_work_that_asks_for_signals_itself_is_not_left(said):
    with Stop() as stop, stop.heeded(said.append, until="asked"):
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            send(signum)
        assert (stop.requested, stop.repeats) == (signal.SIGTERM, 2)


def test_when_all_is_done_a_signal_changes_no_exit_code():
    program = BEGUN + "stop.over(0)\nprint(flush=True)\ntime.sleep(600)"
    assert run(program, signal.SIGINT) == (0, "", "")


def test_nor_does_one_while_python_itself_ends():
    """It puts the default handlers back before it deletes what a module holds."""
    program = BEGUN + (
        "import os, signal\n"
        "class Last:\n"
        "    def __del__(self, kill=os.kill, own=os.getpid(), signum=signal.SIGINT):\n"
        "        kill(own, signum)\n"
        "last = Last()\n"
        "stop.over(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_handlers_of_before_come_back():
    before = [signal.getsignal(s) for s in ENDINGS], sys.unraisablehook
    with Stop() as stop, stop.interruptible():
        assert [signal.getsignal(s) for s in ENDINGS] != before[0]
    assert ([signal.getsignal(s) for s in ENDINGS], sys.unraisablehook) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
