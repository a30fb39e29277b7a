"""Workers that stand while they are connected: each of these waits ends, and names them."""

import re
from pathlib import Path

import pytest

from launcher.cluster import worker_group
from launcher.cluster.devices import emulated_pool
from launcher.cluster.errors import HungError
from launcher.cluster.ray.private_ray import PrivateRay
from launcher.cluster.ray.worker import silent_servers
from launcher.cluster.worker_group import WAITS, WorkerGroup
from launcher.config.cluster import Emulated


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("join", marks=pytest.mark.slow),
        *(pytest.param(m, marks=pytest.mark.stress) for m in ("coordinator", "connect", "meet")),
    ],
)
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
