"""A worker class in a module that, as a user's may be, only the driver's search path leads to."""

import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

PROBE = '''
"""What the tests run inside worker processes."""
import os
import signal
import subprocess
import sys
import threading

AT_IMPORT = {"jax": "jax" in sys.modules, "platforms": os.environ.get("JAX_PLATFORMS")}


class Broken(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, detail):
        super().__init__(f"broken: {detail}")
        self.lock = threading.Lock()


class Probe:
    def __init__(self, start=0):
        if start is None:
            raise Broken("no start")
        self.total = start

    def add(self, number):
        self.total += number
        return self.total

    def place(self):
        return {"pid": os.getpid(), "folder": os.getcwd(), "path": sys.path, **AT_IMPORT}

    def variable(self, name):
        return os.environ.get(name)

    def devices(self):
        import jax

        return [device.platform for device in jax.devices()]

    def fail(self):
        raise Broken("on purpose")

    def unpicklable(self):
        return threading.Lock()

    def wait(self, path):
        with open(path) as pipe:
            return pipe.read()

    def start(self):
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    def say(self, text):
        print(text)
        os.write(2, b"and an error\\n")

    def take(self, *numbers):
        for number in numbers:
            os.kill(os.getpid(), number)
        return "alive"

    def end(self, code):
        print("last words", flush=True)
        os._exit(code)
'''


@pytest.fixture(scope="module")
def probe_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    (folder / "cluster_probe.py").write_text(PROBE)
    return folder


@pytest.fixture(scope="module")
def probe(probe_folder):
    """The class `Probe`, importable here for as long as the test module runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(probe_folder))
        import cluster_probe

        yield cluster_probe.Probe
        del sys.modules["cluster_probe"]


HANGS = """
import faulthandler, signal, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
else:
    faulthandler.register(signal.SIGQUIT, file=2)
def hang():
    print("up", flush=True)
    time.sleep(1000)
hang()
"""


@pytest.fixture
def hanging(tmp_path):
    """Start a process that hangs, in place of a worker."""
    processes = []

    def start(*words):
        host = len(processes)
        name, log = f"worker_{host}", tmp_path / f"worker_{host}.log"
        command = [sys.executable, "-c", HANGS, *words]
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True)
        processes.append(process)
        assert process.stdout.readline() == "up\n"
        known = psutil.Process(process.pid)
        wait_for(known, psutil.STATUS_SLEEPING)
        whereabouts = f"{name} (process {process.pid})"
        about = {"name": name, "host": host, "whereabouts": whereabouts, "log": log}
        return SimpleNamespace(process=lambda: known, stop=lambda: stop(known), **about)

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def stop(process):
    process.suspend()
    wait_for(process, psutil.STATUS_STOPPED)


def wait_for(process, status):
    while process.status() != status:  # on a busy machine it takes a while
        time.sleep(0.01)
