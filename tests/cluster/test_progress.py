"""Every wait before the first step ends where a worker makes no progress, and names it."""

import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import launcher
from launcher.cluster import worker_group
from launcher.cluster.errors import HungError
from launcher.cluster.worker_group import WAITS, Progresses, WorkerGroup, wait_of

ROOT = Path(launcher.__file__).parent
CALLED = re.compile(
    r'(?:submit|send|call|_each)\(\s*(?:workers, |"(?:training|evaluating|sampling)", )?"(\w+)"'
)
STILL = 0.5
DOING = {
    "stands": "import time; print('up', flush=True); time.sleep(1000)",
    "computes": "print('up', flush=True)\nwhile True: pass",
    "reads": """
import time
print("up", flush=True)
while True:
    open("/dev/zero", "rb", buffering=0).read(1 << 21)
    time.sleep(0.02)
""",
}


def stand_in(host, process):
    name = f"worker_{host}"
    return SimpleNamespace(name=name, host=host, whereabouts=name, process=process, elsewhere=False)


@pytest.fixture
def worker(monkeypatch):
    """Makes a worker of which a process stands in, that does one of `DOING`."""
    monkeypatch.setattr(worker_group, "STILL_SECONDS", STILL)
    monkeypatch.setattr(worker_group, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(worker_group, "diagnose", lambda handle: "as it is")
    processes = []

    def made(doing):
        command = [sys.executable, "-c", DOING[doing]]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "up\n"
        processes.append(process)
        known = psutil.Process(process.pid)
        return stand_in(len(processes) - 1, lambda: known)

    yield made
    for process in processes:
        process.kill()
        process.communicate()


def watched(workers, method, seconds, timeout=60.0):
    """Wait for answers that never come; the error that ends it, or None after so many seconds."""
    group = WorkerGroup(workers, lambda: None, timeout, "cluster.step_timeout")
    watch, end = group.watch(starting=True, method=method), time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            watch(workers)
        except HungError as error:
            return str(error).splitlines()[0]
        time.sleep(0.05)
    return None


@pytest.mark.sampled(5, rest="slow")
@pytest.mark.parametrize("method", [*WAITS, "step"])
def test_each_wait_ends_in_time_and_names_who_stands(monkeypatch, method):
    """By its own count of calls, so that none has to be waited for."""
    monkeypatch.setattr(worker_group, "diagnose", lambda handle: "as it is")
    both = [stand_in(host, lambda: None) for host in range(2)]
    group = WorkerGroup(both, lambda: None, 600.0, "cluster.step_timeout")
    watch, wait = group.watch(starting=True, method=method), wait_of(method)
    by_time = wait.progresses is Progresses.STEP
    seconds, setting = (600, " (cluster.step_timeout)") if by_time else (120, "")
    for _ in range(int(seconds / worker_group.WATCH_SECONDS) - 1):
        watch(both[1:])
    said = f"no answer from worker_1 for {seconds} s{setting}, while {wait.words}\n"
    with pytest.raises(HungError, match=re.escape(said)):
        watch(both[1:])


def test_a_wait_for_work_ends_without_progress_and_names_who_stands(worker):
    workers, words = [worker("computes"), worker("stands")], wait_of("restore").words
    assert watched(workers, "restore", 30) == f"no answer from worker_1 for 0.5 s, while {words}"


def test_one_that_is_done_may_wait_for_another_that_still_computes(worker):
    """As two that meet at the end of their compilation, of which one takes much longer."""
    busy, done = worker("computes"), worker("stands")
    assert watched([busy, done], "compile", 4 * STILL) is None
    busy.process().kill()
    busy.process().wait()
    told = watched([busy, done], "compile", 30)
    assert re.fullmatch(r"no answer from worker_\d, worker_\d for 0.5 s, while it compiles", told)


@pytest.mark.parametrize("call", ["connect", "setup"])
def test_a_wait_for_other_processes_ends_however_busy_they_are(worker, call):
    words = wait_of(call).words
    assert watched([worker("computes")], call, 30) == (
        f"no answer from worker_0 for 0.5 s, while {words}"
    )


def test_what_may_stand_behind_a_step_may_take_as_long(worker):
    one = [worker("stands")]
    assert watched(one, "fetch", 4 * STILL) is None
    assert watched(one, "fetch", 30, timeout=2.0) == (
        "no answer from worker_0 for 2 s (cluster.step_timeout), while it runs `fetch`"
    )


def test_machines_that_cannot_be_reached_do_not_hold_up_the_wait(worker):
    """They are asked aside, and their silence is no progress."""
    asked = []

    def away(function, seconds):
        asked.append(seconds)
        time.sleep(1)
        raise TimeoutError

    far = [worker("computes") for _ in range(3)]
    for one in far:
        one.process, one.elsewhere, one.run_on_node = lambda: None, True, away
    began = time.monotonic()
    assert watched(far, "restore", 30).startswith("no answer from worker_0, worker_1, worker_2")
    assert time.monotonic() - began < 10 * STILL
    assert asked


def test_what_a_machine_elsewhere_tells_is_progress(worker):
    far, used = worker("stands"), [0]

    def told(function, seconds):
        used[0] += 1
        return float(used[0]), 0

    far.process, far.elsewhere, far.run_on_node = lambda: None, True, told
    assert watched([far], "restore", 4 * STILL) is None


@pytest.mark.parametrize("doing", ["computes", "reads"])
def test_what_gets_on_is_waited_for(worker, doing):
    assert watched([worker(doing)], "restore", 3 * STILL) is None


def test_a_wait_tells_what_is_read_or_how_many_have_answered(worker):
    both, told = [worker("reads"), worker("stands")], []
    group = WorkerGroup(both, lambda: None, 60.0, "cluster.step_timeout")
    watch = group.watch(starting=True, method="connect", advance=lambda *far: told.append(far))
    watch(both)
    watch(both[1:])
    assert told == [(0, 2, "processes"), (1, 2, "processes")]
    watch = group.watch(starting=True, method="restore", advance=lambda *far: told.append(far))
    while told[-1][2] != "MiB read":
        watch(both[:1])
        time.sleep(0.05)
    assert told[-1][0] >= 1
    assert told[-1][1] is None


def test_what_was_stopped_does_not_get_on(worker):
    stopped = worker("computes")
    stopped.process().suspend()
    told = watched([stopped], "compiled", 30)
    assert told == "no answer from worker_0 for 0.5 s, while it compiles"


def test_what_is_busy_to_no_end_is_given_up_at_last(worker):
    found = watched([worker("computes")], "compile", 30, timeout=0.3)
    assert found == "no answer from worker_0 for 3 s, while it compiles"


def test_every_wait_is_for_a_call():
    rooms = [
        path
        for room in ("api", "cluster", "driver", "inference")
        for path in (ROOT / room).rglob("*.py")
    ]
    called = {name for path in rooms for name in CALLED.findall(path.read_text())}
    assert called >= {"build", "compiled", "setup", "restore", "create", "first_batch", "step"}
    assert set(WAITS) - called == set()
