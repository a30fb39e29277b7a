"""`launcher.ParameterServer` in a script: two workers, and servers that sum their gradients."""

import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest

import launcher
from launcher.cluster.errors import HungError, WorkerError
from launcher.plan import PlanError

X = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
OPTIMIZER = optax.adam(1e-2)


def init(key):
    weights = jax.random.normal(key, (2, 16, 16)) / 4
    return weights, OPTIMIZER.init(weights)


def loss(weights, x):
    return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - x) ** 2)


def updated(state, grads):
    updates, opt_state = OPTIMIZER.update(grads, state[1], state[0])
    return optax.apply_updates(state[0], updates), opt_state


def step(state, x):
    value, grads = launcher.value_and_grad(loss)(state[0], x)
    return updated(state, grads), value


def alone(steps):
    """The state and the losses of plain JAX."""
    state, values = init(jax.random.key(0)), []
    for _ in range(steps):
        value, grads = jax.value_and_grad(loss)(state[0], X)
        state = updated(state, grads)
        values.append(float(value))
    return state, values


@pytest.fixture(scope="module")
def session():
    launcher.init(num_nodes=2, num_devices_per_node=2, step_timeout=30.0)
    before = launcher.workers()  # which does not decide how they are connected
    yield before
    launcher.shutdown()


@pytest.mark.slow
def test_a_session_with_servers_does_all_that_one_with_collectives_does(session, tmp_path):
    train = launcher.parallelize(step, method=launcher.ParameterServer(bucket_bytes=1024))
    state, values = train.create(init, jax.random.key(0), like=X), []
    train.warmup(state, X)
    for _ in range(4):
        state, value = train(state, X)
        values.append(float(value))
    expected, losses = alone(4)
    np.testing.assert_allclose(values, losses, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(state[0]), expected[0], rtol=1e-5, atol=1e-6)
    assert train.last_plan.method == "parameter_server"

    assert [w.devices for w in session] == [(0, 1), (2, 3)]
    assert [w.process for w in session] == launcher.foreach_worker(os.getpid)
    assert launcher.foreach_worker(jax.process_count) == [1, 1]
    copies = launcher.foreach_replica(lambda state: state[0], state)
    assert len(copies) == 4
    assert all(copy.tobytes() == np.asarray(state[0]).tobytes() for copy in copies)
    assert launcher.on_first(lambda state: state[0].shape, state) == (2, 16, 16)
    assert state[0].placement == "whole, on devices 0, 1 of each of 2 workers"
    launcher.check_replicas(state)

    launcher.save(tmp_path / "saved", state)
    restored = launcher.restore(tmp_path / "saved", like=state)
    assert np.array_equal(np.asarray(restored[0]), np.asarray(state[0]))
    launcher.check_replicas(restored)

    gradients = launcher.parallelize(
        lambda state, x: launcher.value_and_grad(loss)(state[0], x),
        method=launcher.ParameterServer(),
        donate_argnums=(),
    )
    apply = launcher.parallelize(updated, method=gradients, batch_argnums=())
    _, grads = gradients(state, X)
    after, (next_one, _) = apply(restored, grads), train(state, X)
    np.testing.assert_allclose(np.asarray(after[0]), np.asarray(next_one[0]), rtol=1e-5, atol=1e-6)

    collectives = launcher.parallelize(step, method=launcher.DataParallel())
    with pytest.raises(PlanError, match="through parameter servers alone, since its first step"):
        collectives(init(jax.random.key(0)), X)


@pytest.mark.slow
def test_a_replica_that_was_changed_on_one_worker_is_named(session):
    train = launcher.parallelize(step, method=launcher.ParameterServer(bucket_bytes=1024))
    state = train.create(init, jax.random.key(0), like=X)

    def spoil(weights):
        import ctypes

        if os.getpid() == session[1].process:
            first = weights.block_until_ready().addressable_shards[1].data
            ctypes.memset(first.unsafe_buffer_pointer(), 1, 4)

    launcher.foreach_worker(spoil, state[0])
    with pytest.raises(launcher.ReplicaError, match=r"of 0 on device 3 \(process 1\) differs"):
        launcher.check_replicas(state)


@pytest.mark.slow
def test_servers_that_are_stopped_or_killed_are_named():
    launcher.shutdown()
    for number, error in [(signal.SIGKILL, WorkerError), (signal.SIGSTOP, HungError)]:
        launcher.init(num_nodes=2, num_devices_per_node=1, step_timeout=3.0)
        train = launcher.parallelize(step, method=launcher.ParameterServer())
        state = train.create(init, jax.random.key(0), like=X)
        train.warmup(state, X)
        every = psutil.Process().children(recursive=True)
        servers = [p for p in every if " ".join(p.cmdline()).startswith("ray::Server")]
        assert len(servers) == 2
        for server in servers:
            server.send_signal(number)
        with pytest.raises(error, match=r"parameter server \d on host \d"):
            float(train(state, X)[1])
        with pytest.raises(error, match=r"parameter server \d on host \d"):
            launcher.foreach_worker(os.getpid)
        launcher.shutdown()
        assert not any(server.is_running() for server in servers)


@pytest.mark.stress
def test_ctrl_c_ends_a_wait_for_a_server():
    launcher.init(num_nodes=2, num_devices_per_node=1)
    train = launcher.parallelize(step, method=launcher.ParameterServer())
    state = train.create(init, jax.random.key(0), like=X)
    train.warmup(state, X)
    for process in psutil.Process().children(recursive=True):
        if " ".join(process.cmdline()).startswith("ray::Server"):
            process.send_signal(signal.SIGSTOP)
    _, value = train(state, X)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        float(value)
    assert time.monotonic() - began < 30
    launcher.shutdown()
