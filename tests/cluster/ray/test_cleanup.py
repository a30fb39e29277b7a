"""Nothing outlives its driver, however the driver ends, and nothing but the driver ends it."""

import fcntl
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

import launcher
from launcher.cluster.devices import emulated_pool
from launcher.cluster.errors import ClusterError, RayEndedError
from launcher.cluster.ray.private_ray import PrivateRay
from launcher.cluster.ray.session import StartLimit
from launcher.config.cluster import Emulated

ONE_DEVICE = emulated_pool(Emulated(gpus=1))

DRIVER = """
import os
import signal
import sys
from pathlib import Path

from cluster_probe import Probe
from launcher.cluster.devices import emulated_pool
from launcher.cluster.ray.private_ray import PrivateRay
from launcher.config.cluster import Emulated

caught = []
if "handle" in sys.argv:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: caught.append(signal.Signals(number).name))
with PrivateRay(emulated_pool(Emulated(gpus=1)), Path(sys.argv[1])) as session:
    (worker,) = session.spawn(Probe)
    print("up", worker.submit("add", 1).result(), flush=True)
    for line in sys.stdin:
        if line == "end\\n":
            break
        print(caught, worker.submit("add", 1).result(), flush=True)
print("closed", flush=True)
"""


def environ_with(*folders):
    root = Path(launcher.__file__).parents[1]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*folders, root, *sys.path]))}


def ended(program, folder, *search):
    """The end of a program whose argument is `folder`, and which imports from others first."""
    command = [sys.executable, "-c", program, str(folder)]
    environ = environ_with(*search or [folder])
    return subprocess.run(command, capture_output=True, text=True, env=environ)


@pytest.fixture
def run_driver(probe_folder, tmp_path):
    """Start a driver whose worker is up; its standard input and output are pipes."""
    drivers = []

    def run(*words, **settings):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", DRIVER, str(tmp_path), *words]
        environ = environ_with(probe_folder)
        drivers.append(driver := subprocess.Popen(command, env=environ, **pipes, **settings))
        assert driver.stdout.readline() == "up 1\n"
        return driver

    yield run
    for driver in drivers:
        driver.kill()
        driver.communicate()


def below(process):
    """Every process below, among them the workers and Ray's own; and the folder they share."""
    processes = psutil.Process(process).children(recursive=True)
    assert any(name.startswith("ray::Worker") for name in map(psutil.Process.name, processes))
    (head,) = psutil.Process(process).children()
    (folder,) = (word for word in head.cmdline() if word.startswith("--scratch="))
    return processes, Path(folder.removeprefix("--scratch="))


def assert_gone(processes, folder):
    """Wait for the end of `processes`; reaping orphans is the machine's own affair."""
    _, alive = psutil.wait_procs(processes, timeout=30)
    states = [process.status() for process in alive if process.is_running()]
    assert set(states) <= {psutil.STATUS_ZOMBIE}
    assert not folder.exists()


@pytest.mark.slow
def test_a_closed_session_leaves_nothing_and_another_can_follow(probe, tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    environ = dict(os.environ)
    for start_value in (1, 2):
        with PrivateRay(ONE_DEVICE, tmp_path) as session:
            (worker,) = session.spawn(probe, start_value)
            assert worker.submit("add", 0).result() == start_value
            processes, folder = below(os.getpid())
        assert not [process for process in processes if process.is_running()]
        assert not folder.exists()
        session.close()  # again: harmless
    assert signal.getsignal(signal.SIGTERM) is handler
    assert dict(os.environ) == environ


@pytest.mark.slow
def test_an_interrupt_at_the_terminal_reaches_the_driver_alone(run_driver):
    """Control-C goes to every process of the foreground group; so does a group-wide SIGTERM."""
    terminal, its_end = pty.openpty()

    def take_terminal():
        fcntl.ioctl(its_end, termios.TIOCSCTTY, 0)

    driver = run_driver(
        "handle",
        start_new_session=True,
        preexec_fn=take_terminal,
        pass_fds=[its_end],
        stderr=its_end,
    )
    processes, folder = below(driver.pid)
    os.write(terminal, b"\x03")
    os.killpg(driver.pid, signal.SIGTERM)
    caught, total = "", 1
    while not ("SIGINT" in caught and "SIGTERM" in caught):  # as soon as they are delivered
        driver.stdin.write("next\n")
        driver.stdin.flush()
        caught, _, answer = driver.stdout.readline().rpartition(" ")
        total += 1
        assert int(answer) == total
    assert caught in ("['SIGINT', 'SIGTERM']", "['SIGTERM', 'SIGINT']")
    assert all(process.is_running() for process in processes)
    driver.stdin.write("end\n")
    driver.stdin.flush()
    assert driver.stdout.readline() == "closed\n"
    assert driver.wait() == 0
    assert_gone(processes, folder)
    os.close(its_end)
    os.set_blocking(terminal, False)
    assert os.read(terminal, 1000) == b"^C"  # the echo; Ray's own handlers would have cried out
    os.close(terminal)


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing_and_a_neighbour_goes_on(run_driver, probe, tmp_path):
    """What is stopped ends with it, too; of the neighbour's, all but the worker go on."""
    with PrivateRay(ONE_DEVICE, tmp_path) as session:
        driver = run_driver()
        processes, folder = below(driver.pid)
        (worker,) = session.spawn(probe, 5)
        for process in processes:
            process.suspend()
        driver.kill()
        assert driver.wait() == -signal.SIGKILL
        assert_gone(processes, folder)

        mine, _ = below(os.getpid())
        for process in mine:
            if process.pid != worker.process().pid:
                process.suspend()
        while psutil.STATUS_STOPPED in [process.status() for process in mine]:
            session.check()
            time.sleep(0.1)
        assert worker.submit("add", 1).result() == 6


@pytest.mark.stress
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_driver_that_a_signal_ends_leaves_nothing(run_driver, number):
    driver = run_driver(stderr=subprocess.DEVNULL)
    processes, folder = below(driver.pid)
    driver.send_signal(number)
    assert driver.wait(60) == -number  # never where SIGINT is ignored, as in a script's background
    assert_gone(processes, folder)


SIGNALLED = """
import signal
import sys
import time
from pathlib import Path

import ray_hook
from cluster_probe import Probe
from launcher.cluster.devices import emulated_pool
from launcher.cluster.ray.private_ray import PrivateRay
from launcher.config.cluster import Emulated

caught = []
signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
with PrivateRay(emulated_pool(Emulated(gpus=1)), Path(sys.argv[1])) as session:
    ray_hook.signals_while_it_connects()
    (worker,) = session.spawn(Probe)
    time.sleep(4)  # by then the alarm that Ray sets would have aborted this process
    print(bool(caught), worker.submit("add", 1).result())
"""
RAY_HOOK = """
import signal
import threading
import time


def signals_while_it_connects():
    import ray

    init, done, begun = ray.init, threading.Event(), threading.Event()

    def shoot():  # at a thread that blocks nothing, such as libraries have
        begun.wait()
        while not done.is_set():
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            time.sleep(0.01)

    thread = threading.Thread(target=shoot)
    thread.start()

    def signalled(*arguments, **settings):
        begun.set()
        try:
            return init(*arguments, **settings)
        finally:
            done.set()
            thread.join()

    ray.init = signalled
"""


@pytest.mark.slow
def test_signals_that_come_while_ray_connects_are_delivered_afterwards(probe_folder, tmp_path):
    """Ray itself would exit, or abort the process."""
    (tmp_path / "ray_hook.py").write_text(RAY_HOOK)
    run = ended(SIGNALLED, tmp_path, probe_folder, tmp_path)
    assert (run.returncode, run.stdout) == (0, "True 1\n"), run.stderr


@pytest.mark.stress  # it takes Ray's agents more than a minute
def test_processes_follow_even_a_killed_head(run_driver):
    driver = run_driver()
    processes, _ = below(driver.pid)
    (head,) = psutil.Process(driver.pid).children()
    head.kill()
    driver.kill()
    driver.wait()
    # Ray's agents try to tell the dead Ray for a minute; the folder is swept by a later run.
    _, alive = psutil.wait_procs(processes, timeout=90)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_ray_that_does_not_come_up_is_an_error_that_quotes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "ray.py").write_text("raise ImportError('this ray is out of order')")
    with PrivateRay(ONE_DEVICE, tmp_path) as session:
        for wait in (session.begin, session.spawn):  # which says it again
            with pytest.raises(ClusterError, match=r"(?s)Ray did not come up.*is out of order"):
                wait(object)
        (head,) = psutil.Process().children()
    assert not head.is_running()


@pytest.fixture
def silent_ray(tmp_path, monkeypatch):
    """A Ray that says where it is, if that, and nothing else."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(address=""):
        said = f"os.write(__main__.output, b'{address}\\n')" if address else ""
        (tmp_path / "ray.py").write_text(f"import __main__, os, time; {said}\ntime.sleep(600)")

    return make


def stop():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("limit", "error", "told"),
    [
        (StartLimit(0.4), RayEndedError, r"^Ray did not come up within 0.4 s \(cluster.start_"),
        (StartLimit(check=stop), KeyboardInterrupt, None),
    ],
)
def test_a_start_ends_in_time_and_where_it_is_asked_to(silent_ray, tmp_path, limit, error, told):
    silent_ray()
    with PrivateRay(ONE_DEVICE, tmp_path, limit=limit) as session:
        with pytest.raises(error, match=told):
            session.spawn(object)
        (head,) = psutil.Process().children()
    assert not head.is_running()


UNANSWERED = """
import sys
from pathlib import Path

from launcher.cluster.devices import emulated_pool
from launcher.cluster.errors import ClusterError
from launcher.cluster.ray.private_ray import PrivateRay
from launcher.cluster.ray.session import StartLimit
from launcher.config.cluster import Emulated

pool = emulated_pool(Emulated(gpus=1))
try:
    with PrivateRay(pool, Path(sys.argv[1]), limit=StartLimit(2)) as session:
        session.spawn(object)
except ClusterError as error:
    sys.exit(str(error).splitlines()[0])
"""


def test_a_ray_that_gives_no_answer_is_given_up(silent_ray, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        silent_ray(address)
        program = f"import os; os.environ['PYTHONPATH'] = {str(tmp_path)!r}\n{UNANSWERED}"
        run = ended(program, tmp_path, Path(launcher.__file__).parents[1])
    assert run.returncode == 1
    told = f"Ray came up at {address}, but did not answer within 2 s (cluster.start_timeout)."
    assert told in run.stderr.splitlines()


STARTED = """
import pathlib, sys
{first}
from launcher.cluster.devices import DevicePool
from launcher.cluster.ray.private_ray import PrivateRay
session = PrivateRay(DevicePool('cpu', 1, 1, '', ''), pathlib.Path(sys.argv[1]))
"""


def test_a_program_that_ends_without_a_word_ends_its_session_before_ray_disconnects(tmp_path):
    """Ray asked after that starts another one, of its own accord."""
    at_exit = "print('left:', len(psutil.Process().children()))"
    (tmp_path / "ray.py").write_text(f"import atexit, psutil\natexit.register(lambda: {at_exit})")
    run = ended(STARTED.format(first=""), tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (0, "left: 0\n", "")


@pytest.mark.parametrize(
    ("connected", "told"),
    [
        (True, "This process is connected to a Ray already. Call ray.shutdown() first"),
        (False, "Ray was imported before, and this version of it cannot change its settings"),
    ],
)
def test_a_ray_that_cannot_be_set_up_any_more_is_refused(tmp_path, connected, told):
    """One that can, as tests/api/a_script.py imports it, reads its settings again."""
    (tmp_path / "ray.py").write_text(f"def is_initialized():\n    return {connected}")
    run = ended(STARTED.format(first="import ray"), tmp_path)
    assert f"ClusterError: {told}" in run.stderr
