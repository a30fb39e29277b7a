"""Workers on a Ray that others started: they come beside what runs there, and end alone."""

import os
import re
import signal
import socket
import threading

import jax
import numpy as np
import psutil
import pytest

import launcher
from launcher.cluster.devices import DevicePool, emulated_pool
from launcher.cluster.errors import ClusterError
from launcher.cluster.ray.existing_ray import (
    ExistingRay,
    ResourceRequest,
    check_feasible,
    choose_pool,
    find_nodes,
)
from launcher.cluster.ray.private_ray import PrivateRay
from launcher.cluster.ray.ray_compat import Node
from launcher.cluster.ray.session import StartLimit
from launcher.config.cluster import Emulated

LONG, SETTING = StartLimit(120.0), "launcher.init(start_timeout=...)"


def test_ctrl_c_ends_the_wait_for_a_ray_that_never_answers():
    """Before `others`, to which this process is connected then."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ctrl_c = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        ctrl_c.start()
        with pytest.raises(KeyboardInterrupt):
            ExistingRay(f"127.0.0.1:{silent.getsockname()[1]}", None, None, StartLimit(600.0))
        ctrl_c.join()


@pytest.fixture(scope="module")
def others(tmp_path_factory, probe):
    """A Ray with a worker of somebody else, to which this process is connected."""
    pool = emulated_pool(Emulated(gpus=1, hosts=1))
    with PrivateRay(pool, tmp_path_factory.mktemp("logs")) as session:
        (worker,) = session.spawn(probe)
        assert worker.submit("add", 1).result() == 1
        yield worker


def test_workers_come_and_go_beside_others(others, probe):
    ray = ExistingRay("auto", 2, 3, LONG)
    workers = ray.spawn(probe, 5)
    places = [worker.submit("place").result() for worker in workers]
    mine = others.submit("place").result()
    assert len({place["pid"] for place in [*places, mine]}) == 3
    assert places[0]["platforms"] == "cpu"
    assert workers[1].submit("devices").result() == ["cpu"] * 3
    assert [worker.address for worker in workers] == ["127.0.0.1"] * 2
    processes = [psutil.Process(place["pid"]) for place in places]
    processes[1].suspend()
    ray.close()
    ray.close()
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    assert others.submit("add", 1).result() == 2


@pytest.mark.parametrize("why", ["no room", "no answer"])
def test_workers_that_a_ray_does_not_start_are_named(others, probe, why):
    import ray as rays_own

    request = ResourceRequest(num_cpus=1 if why == "no room" else 0)
    ray = ExistingRay("auto", 1, 1, StartLimit(3.0, SETTING), request)
    raylets = [p for p in psutil.Process().children(recursive=True) if p.name() == "raylet"]
    # And whoever would have them go on: the head above Ray's own command.
    silent = [each for raylet in raylets for each in (raylet.parent().parent(), raylet)]
    message = rf"did not start worker_0 within 3 s \({re.escape(SETTING)}\): it still tries"
    if why == "no room":
        holder = rays_own.util.placement_group([{"CPU": 1}])
        assert holder.wait(60)
        message = (
            rf"did not have CPU: 1 free for each of 1 workers within 3 s \({re.escape(SETTING)}\): "
            "free now are CPU: 0 in all"
        )
    else:
        for each in silent:
            each.suspend()
    with pytest.raises(ClusterError, match=f"Ray at auto {message}"):
        ray.spawn(probe)
    if why == "no room":
        rays_own.util.remove_placement_group(holder)
    else:
        for each in silent:
            each.resume()
    ray.close()
    assert others.submit("add", 0).result() >= 1


def test_an_address_where_nothing_listens_is_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    message = f"no Ray can be reached at {address}: Connection refused; `ray status`"
    with pytest.raises(ClusterError, match=re.escape(message)):
        find_nodes(address, LONG)
    with pytest.raises(ClusterError, match="That is a Ray Client"):
        find_nodes("ray://127.0.0.1:10001", LONG)


@pytest.mark.slow
def test_a_wrong_secret_is_named(others, monkeypatch):
    import ray

    address = ray.get_runtime_context().gcs_address
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # look for it on the loopback
    with pytest.raises(ClusterError, match=rf"no Ray .* at {address}: .*AuthToken"):
        find_nodes(address, LONG)


def test_a_ray_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        message = rf"no Ray answers at {address}: waited 2 s \(launcher\.init\(start_timeout="
        with pytest.raises(ClusterError, match=message):
            find_nodes(address, StartLimit(2.0, SETTING))


@pytest.mark.slow
def test_steps_run_on_an_existing_ray(others):
    def step(state, batch):
        value, grad = launcher.value_and_grad(lambda w, x: ((x @ w) ** 2).mean())(state, batch)
        return state - grad, value

    launcher.init("ray", address="auto", num_nodes=2, num_devices_per_node=1)
    train = launcher.parallelize(step)
    batch = np.ones((4, 3), np.float32)
    state = train.create(lambda: jax.numpy.ones((3, 3)), like=batch)
    state, value = train(state, batch)
    assert float(value) == 9.0
    launcher.shutdown()
    assert others.submit("add", 0).result() >= 1


def node(gpus, kind="A100"):
    resources = {"CPU": 8.0}
    if gpus:
        resources |= {"GPU": float(gpus), f"accelerator_type:{kind}": 1.0}
    return Node("id", "127.0.0.1", resources)


@pytest.mark.parametrize(
    ("nodes", "asked", "found"),
    [
        ([node(0), node(0)], (None, None), ("cpu", 2, 4)),
        ([node(0)], (3, 2), ("cpu", 3, 2)),
        ([node(8), node(8), node(0)], (None, None), ("gpu", 2, 8)),
        ([node(8), node(4)], (None, None), ("gpu", 2, 4)),
        ([node(8), node(4)], (1, None), ("gpu", 1, 8)),
        ([node(8), node(8)], (2, 4), ("gpu", 2, 4)),
    ],
)
def test_the_devices_are_what_is_asked_for_of_what_is_there(nodes, asked, found):
    pool = choose_pool(nodes, *asked)
    assert (pool.kind, pool.hosts, pool.devices_per_host) == found
    assert pool.device_name == ("A100" if pool.kind == "gpu" else "emulated CPU device")


@pytest.mark.parametrize("asked", [(3, None), (None, 9), (2, 8)])
def test_more_gpus_than_there_are_are_refused(asked):
    with pytest.raises(ClusterError, match="2 nodes with 8, 4 GPUs"):
        choose_pool([node(8), node(4)], *asked)


TWO = (
    Node("a", "10.0.0.1", {"CPU": 4.0, "my_node": 1.0, "node:10.0.0.1": 1.0, "memory": 9e9}),
    Node("b", "10.0.0.2", {"CPU": 4.0, "node:10.0.0.2": 1.0}),
)
GPUS = tuple(Node(n, f"10.0.0.{i}", {"CPU": 8.0, "GPU": 8.0}) for i, n in enumerate("cd", 3))


@pytest.mark.parametrize(
    ("request_", "hosts", "nodes", "kind", "message"),
    [
        (ResourceRequest(), 100, TWO, "cpu", ""),
        (ResourceRequest(4), 2, TWO, "cpu", ""),
        (ResourceRequest(1, {"my_node": 0.1}), 4, TWO, "cpu", ""),
        (ResourceRequest(0, {"my_node": 0.1}), 10, TWO, "cpu", ""),  # ten times 0.1 is 1
        (ResourceRequest(8), 2, GPUS, "gpu", ""),
        (
            *(ResourceRequest(0, {"no_such": 1}), 1, TWO, "cpu"),
            "1 worker demands no_such: 1, which this Ray can never give: 10.0.0.1 has no_such: 0, "
            "my_node: 1; 10.0.0.2 has no_such: 0",
        ),
        (
            *(ResourceRequest(3, {"my_node": 1}), 2, TWO, "cpu"),
            "each of 2 workers demands my_node: 1, which this Ray can never give: 10.0.0.1 has "
            "my_node: 1; 10.0.0.2 has my_node: 0",
        ),
        (
            *(ResourceRequest(9), 2, GPUS, "gpu"),
            "each of 2 workers demands CPU: 9 on a node of its own, which this Ray can never give: "
            "10.0.0.3 has CPU: 8; 10.0.0.4 has CPU: 8",
        ),
        (  # Each is there, but not on one node.
            *(ResourceRequest(5, {"a": 1}), 1),
            *((Node("x", "x", {"CPU": 9.0}), Node("y", "y", {"a": 1.0})), "cpu"),
            "1 worker demands CPU: 5, a: 1, which this Ray can never give: x has CPU: 9, a: 0; y "
            "has CPU: 0, a: 1",
        ),
    ],
)
def test_an_infeasible_request_names_what_is_missing(request_, hosts, nodes, kind, message):
    bundle, error = request_.bundle(2 if kind == "gpu" else 0), ""
    try:
        check_feasible(bundle, DevicePool(kind, hosts, 2, "", ""), nodes)
    except ClusterError as refusal:
        error = str(refusal)
    assert error == message
