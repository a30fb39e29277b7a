"""What other users of the machine can do to a run: nothing; one of them tries it."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from listening import documented, ports

from launcher.cluster.devices import emulated_pool
from launcher.cluster.ray.private_ray import PrivateRay
from launcher.cluster.worker_group import WorkerGroup
from launcher.config.cluster import Emulated

NOBODY = 65534
TWO_HOSTS = emulated_pool(Emulated(gpus=2, hosts=2))

# Tells each thing that it could do, once; the trap is where it would have the driver call.
STRANGER = """
import os, socket, sys, threading

base, told = sys.argv[1], set()


def tell(what):
    if what not in told:
        told.add(what)
        print(what, flush=True)


def listen():
    while True:
        caller, _ = trap.accept()
        tell("was called")
        caller.close()


def attempt(what, path, action):
    try:
        action(path)
    except OSError:
        return
    tell(f"{what} {path}")


def plant(path):
    with open(path + "/ray_current_cluster", "w") as file:
        file.write("%s:%d" % trap.getsockname())


def connect(path):
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(path)


trap = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=listen, daemon=True).start()
while True:
    for folder, folders, files in os.walk(base):
        for path in [folder + "/" + name for name in folders]:
            attempt("planted in", path, plant)
            attempt("moved", path, lambda path: os.rename(path, path + ".moved"))
        for path in [folder + "/" + name for name in files]:
            attempt("read", path, lambda path: open(path).close())
            attempt("connected to", path, connect)
"""

MET = '''
"""Workers that have met, and the number that their first message goes by."""
from launcher.cluster.process_group import Peer


class Met(Peer):
    def key(self):
        return self._transport._first
'''


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A folder for temporary files as /tmp is: everybody can write into it."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


class Stranger:
    """A process of another user's that attacks what is in `folder`."""

    def __init__(self, folder, output):
        self._folder, self._output = folder, output
        command = [python_of_others(), "-I", "-c", STRANGER, str(folder)]
        with output.open("w") as file:
            self._process = subprocess.Popen(command, stdout=file, **AS_NOBODY)

    def told(self):
        """What it could do, once it has tried again: it gets into what is left open."""
        bait = Path(tempfile.mkdtemp(prefix="bait", dir=self._folder))
        bait.chmod(0o777)
        while f"planted in {bait}\n" not in self._output.read_text():
            assert self._process.poll() is None
            time.sleep(0.01)
        bait.chmod(0o700)  # first: it would put more into it
        shutil.rmtree(bait)
        return [line for line in self._output.read_text().splitlines() if "/bait" not in line]

    def end(self):
        self._process.kill()
        self._process.wait()


AS_NOBODY = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}


def python_of_others():
    """A Python that other users may run, too; skips the test where there is none, or no way to
    become another user."""
    if os.getuid() != 0:
        pytest.skip("only root can play another user")
    for python in (sys.executable, shutil.which("python3", path=os.defpath)):
        try:
            if python and subprocess.run([python, "-I", "-c", ""], **AS_NOBODY).returncode == 0:
                return python
        except OSError:  # it is in a folder that they cannot enter
            continue
    pytest.skip("no Python here that another user may run")


def open_to_others(paths):
    """Of `paths` those that somebody else can change, fill or connect to, where they lie."""
    return [path for path in paths if os.path.exists(path) and _is_open(Path(path))]


def _is_open(path):
    path = path.resolve()
    if not all(above.stat().st_mode & stat.S_IXOTH for above in path.parents):
        return False
    status = path.stat()
    if status.st_uid not in (0, os.getuid()):
        return True
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    special = stat.S_ISCHR(status.st_mode)  # /dev/null
    return bool(status.st_mode & 0o022) and not sticky and not special


def used_by(processes):
    """Every path that the processes have open or stand in."""
    for process in processes:
        links = [Path(f"/proc/{process.pid}/cwd"), *Path(f"/proc/{process.pid}/fd").glob("*")]
        for link in links:
            try:
                target = os.readlink(link)
            except OSError:  # closed meanwhile, or its process has ended
                continue
            if target.startswith("/"):
                yield target


def below(folder):
    """Every path below a folder."""
    for at, folders, files in os.walk(folder):
        yield from (os.path.join(at, name) for name in folders + files)


@pytest.mark.slow
def test_a_run_of_two_hosts_is_closed_to_other_users(shared, tmp_path, monkeypatch):
    (tmp_path / "met.py").write_text(MET)
    monkeypatch.syspath_prepend(str(tmp_path))
    import met

    before = ports([psutil.Process()])  # of other tests' sessions
    os.mkfifo(tmp_path / "ray.log")  # in what is no log nobody waits, or writes
    os.mkfifo(tmp_path / "worker_0.log")
    (tmp_path / "worker_1.log").symlink_to(tmp_path / "met.py")
    with PrivateRay(TWO_HOSTS, tmp_path) as session:
        handles = session.spawn(met.Met)
        group = WorkerGroup(handles, session.check, 600.0, "cluster.step_timeout")
        group.join()
        one, other = (handle.submit("key").result() for handle in handles)
        assert one == other > 2**32  # nobody finds it by counting
        processes = psutil.Process().children(recursive=True)
        kinds = {process.name() for process in processes}
        assert {"raylet", "gcs_server"} <= kinds
        assert len(list(shared.iterdir())) == 1  # the socket in which the workers met is gone
        assert open_to_others([*below(shared), *used_by(processes)]) == []
        there = ports([psutil.Process(), *processes])
        listening = {address: kind for address, kind in there.items() if address not in before}
        del sys.modules["met"]
    assert {ip for ip, _ in listening} == {"127.0.0.1"}
    assert Counter(listening.values()) == documented("one machine", 2)
    assert list(shared.iterdir()) == []
    assert (tmp_path / "met.py").read_text() == MET


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("starts", [1, 20])
def test_a_stranger_gets_into_no_start(starts, shared, tmp_path, probe):
    stranger = Stranger(shared, tmp_path / "told")
    try:
        for number in range(starts):
            with PrivateRay(TWO_HOSTS, tmp_path) as session:
                while "raylet" not in map(name_of, psutil.Process().children(recursive=True)):
                    assert stranger.told() == []  # before the driver would follow it
                worker, _ = session.spawn(probe, number)
                assert worker.submit("add", 1).result() == number + 1
                assert stranger.told() == []
    finally:
        stranger.end()


def name_of(process):
    try:
        return process.name()
    except psutil.Error:  # it has ended
        return ""
