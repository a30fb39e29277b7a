"""Workers that stand while they are connected: each of these waits ends, and names them."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from launcher.cluster import worker_group
from launcher.cluster.devices import emulated_pool
from launcher.cluster.errors import HungError, RayEndedError, WorkerError
from launcher.cluster.ray.private_ray import PrivateRay
from launcher.cluster.ray.worker import gather, has_ended, silent_servers
from launcher.cluster.worker_group import WAITS, WorkerGroup
from launcher.config.cluster import Emulated


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["join", "connect", "meet"])
def test_workers_that_stand_while_they_connect_are_named(method, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from held import Held

    monkeypatch.setattr(worker_group, "STILL_SECONDS", 4.0)
    with PrivateRay(emulated_pool(Emulated(gpus=2, hosts=2)), tmp_path) as session:
        workers = session.spawn(Held, method)
        group = WorkerGroup(workers, session.check, 600.0, "cluster.step_timeout")
        said = re.escape(f" for 4 s, while {WAITS[method].words}\nworker_0: ")
        servers = session.serve(1, 2) if method == "meet" else []
        assert not silent_servers(servers, 60.0)  # whose processes are up
        with pytest.raises(HungError, match=f"(?s)no answer from worker_0.*{said}.*held.py"):
            group.use_servers(servers) if servers else group.join()


COMPILES = '''
"""A worker that compiles a program of its own devices and one of all, and counts what JAX kept."""
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from launcher.cluster.process_group import Peer


class Compiles(Peer):
    def compile(self):
        events = []
        jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
        for devices in (jax.local_devices(), jax.devices()):
            mesh = jax.sharding.Mesh(np.array(devices), ("a",))
            put = NamedSharding(mesh, PartitionSpec("a"))
            jax.jit(lambda: jax.numpy.arange(8.0), out_shardings=put).lower().compile()
        kinds = "cache_misses", "cache_hits"
        return [events.count(f"/jax/compilation_cache/{kind}") for kind in kinds]
'''


@pytest.mark.slow
def test_each_process_keeps_its_programs_and_outlives_the_first(tmp_path, monkeypatch):
    (tmp_path / "compiles.py").write_text(COMPILES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    from compiles import Compiles

    with PrivateRay(emulated_pool(Emulated(gpus=4, hosts=2)), tmp_path) as session:
        for counts in ([2, 0], [0, 2]):
            workers = session.spawn(Compiles)
            group = WorkerGroup(workers, session.check, 600.0, "cluster.step_timeout")
            group.join()
            assert group.gather(group.call("compile")) == [counts, counts]
            first, second = (worker.process() for worker in workers)
            first.kill()
            with pytest.raises(WorkerError, match="worker_0"):
                workers[0].submit("process").result()
            time.sleep(1.0)  # JAX would have aborted the other by now
            assert workers[1].submit("process").result() == second.pid
            second.kill()
    del sys.modules["compiles"]


@pytest.mark.slow
def test_workers_begun_beside_others_take_their_place(probe, tmp_path):
    with PrivateRay(emulated_pool(Emulated(gpus=2, hosts=2)), tmp_path) as session:
        used = session.spawn(probe, 1)
        with pytest.raises(RayEndedError):  # nobody is there to end them
            session._end_there()
        begun = session.begin(probe, 2)
        assert gather([worker.submit("add", 0) for worker in (*used, *begun)]) == [1, 1, 2, 2]
        assert session.renews
        child = psutil.Process(used[0].submit("start").result())
        processes = [child, *(worker.process() for worker in used)]
        processes[-1].suspend()
        session._end_there()  # as on several machines
        assert all(map(has_ended, processes))
        session.end_workers()
        assert session.spawn(probe, 2) == begun

        first = session.begin(probe, 3)
        assert session.begin(probe, 3) == []
        second = session.begin(probe, 3, ahead=2)
        assert gather([worker.submit("add", 0) for worker in (*first, *second)]) == [3] * 4
        # While it waits, and nobody has looked for it: the next of its host takes its turn.
        os.kill(first[0].submit("place").result()["pid"], signal.SIGKILL)
        while not first[0].is_lost():
            time.sleep(0.01)
        session.end_workers()
        assert session.spawn(probe, 3) == [second[0], first[1]]
        session.end_workers()
        taken = session.spawn(probe, 3)  # one is left, the other starts
        assert taken[1] is second[1]
        assert gather([worker.submit("add", 0) for worker in taken]) == [3, 3]
        child = psutil.Process(taken[0].submit("start").result())
        session.end_workers()
        ended = [worker.process() for worker in (*begun, *first, *second, *taken)]
        assert all(map(has_ended, [child, *filter(None, ended)]))

        first = session.begin(probe, 4)
        second = session.begin(probe, 4, ahead=2)
        assert gather([worker.submit("add", 0) for worker in (*first, *second)]) == [4] * 4
        os.mkfifo(tmp_path / "pipe")
        second[0].submit("wait", str(tmp_path / "pipe"))
        process = second[0].process()
        assert session.spawn(probe, 4) == first
        while not has_ended(process):  # it would take processors that these need
            time.sleep(0.01)
        session.end_workers()
        assert session.spawn(probe, 4)[1] is second[1]
