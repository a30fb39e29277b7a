"""A driver of two nodes that are both this machine; `test_rendezvous` starts it, and its second
node. A process of its own, because Ray keeps the network that it was first imported for.
"""

import json
import os
import re
import resource
import socket
import sys
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "ray"))
from listening import ports

from launcher.cluster.devices import emulated_pool
from launcher.cluster.errors import ClusterError, WorkerError
from launcher.cluster.ray.private_ray import PrivateRay, secret
from launcher.cluster.slurm.allocation import Allocation
from launcher.cluster.slurm.rendezvous import open_rendezvous, reopened
from launcher.config.cluster import Emulated, Slurm

POOL = emulated_pool(Emulated(gpus=4, hosts=2))
FIRST = Allocation("42", 0, 0, ("node1", "node2"), 0)


class Probe:
    def devices(self):
        import jax

        return len(jax.devices()), os.environ.get("SLURM_NODEID"), os.getpid()

    def wait(self, path):
        with open(path) as pipe:
            return pipe.read()


def met():
    """Workers that become one where they are introduced."""
    from launcher.cluster.process_group import Peer  # loads JAX

    class Met(Probe, Peer):
        pass

    return Met


def tell_ports(workers, second: int) -> None:
    """Print where the processes of each node listen, once the workers know one another."""
    from launcher.cluster.worker_group import WorkerGroup

    workers[1].address = "127.0.0.2"  # they meet as those of two machines do
    group = WorkerGroup(workers, lambda: None, 600.0, "cluster.step_timeout")
    group.join()
    for node in (psutil.Process(), psutil.Process(second)):
        print(json.dumps([*ports([node, *node.children(recursive=True)]).items()]))


def many_open_files() -> None:
    """Have further files get numbers that `select` cannot take."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most))
    for _ in range(1024):
        os.open(os.devnull, os.O_RDONLY)


def strangers_at(address) -> list[socket.socket]:
    """Connections of whoever finds the port: one says something, the others nothing."""
    strangers = [socket.create_connection(address, timeout=60) for _ in range(100)]
    strangers[0].sendall(b"0123 let me in")
    return strangers


def ports_named() -> set[str]:
    """The ports that command lines name: somebody else may listen there first."""
    words = [word for p in psutil.Process().children(recursive=True) for word in p.cmdline()]
    return set(re.findall(r"--(?:gcs_server_)?port=(\d+)", " ".join(words)))


def main(scenario: str, folder: Path, second: int, timeout: int) -> None:
    if scenario == "again":
        many_open_files()
    settings = Slurm(emulated=True, network_interface="lo", start_timeout=timeout)
    with open_rendezvous(folder, FIRST, settings, secret()) as rendezvous:
        (file,) = folder.glob(".rendezvous*")
        assert file.stat().st_mode & 0o777 == 0o600
        address = rendezvous.listener.getsockname()
        strangers = strangers_at(address) if scenario == "again" else []
        with PrivateRay(POOL, folder, rendezvous) as session:
            assert ports_named() <= {"0"}
            if scenario == "absent":
                try:
                    session.spawn(Probe)
                except ClusterError as error:
                    print(error)
                return
            workers = session.spawn(met() if scenario == "ports" else Probe)
            assert ports_named() <= {"0"}
            if scenario == "ports":
                return tell_ports(workers, second)
            told = [worker.submit("devices").result() for worker in workers]
            assert [(devices, node) for devices, node, _ in told] == [(2, None), (2, None)]
            there = {p.pid for p in psutil.Process(second).children(recursive=True)}
            assert [pid in there for _, _, pid in told] == [False, True]
            if scenario in ("dies", "silent"):
                os.mkfifo(folder / "pipe")
                waiting = workers[1].submit("wait", str(folder / "pipe"))
                node = psutil.Process(second)
                everything = [node, *node.children(recursive=True)]
                if scenario == "dies":
                    node.kill()
                else:  # as where the network is cut: nothing there can answer any more
                    for process in everything:
                        process.suspend()
                try:
                    waiting.result()
                except WorkerError as error:
                    print(error.summary)
                finally:
                    if scenario == "silent":
                        for process in everything:
                            process.resume()
                workers[0].submit("devices").result()
        if scenario == "again":
            assert strangers[0].recv(1) == b""
            assert strangers[1].recv(1) == b""  # too many say nothing
            with PrivateRay(POOL, folder, reopened(rendezvous)) as session:
                workers = session.spawn(Probe)
                told = [worker.submit("devices").result() for worker in workers]
                there = {p.pid for p in psutil.Process(second).children(recursive=True)}
                assert [pid in there for _, _, pid in told] == [False, True]
    assert list(folder.glob(".rendezvous*")) == []


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
