"""Waits of a session before its second step: for compilation, and for a first step that is long."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.cluster import worker_group
from launcher.cluster.errors import HungError

STILL = 4.0
X = np.ones((4, 2), np.float32)


def start(workers):
    launcher.init("ray", num_nodes=workers, num_devices_per_node=1, step_timeout=60)


def in_worker():
    return Path("/proc/self/cmdline").read_text().startswith("ray::")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(worker_group, "STILL_SECONDS", STILL)
    yield
    launcher.shutdown()


def parallel(loss):
    @launcher.parallelize(method=launcher.DataParallel(), donate_argnums=())
    def step(w, x):
        value, grads = launcher.value_and_grad(loss)(w, x)
        return w - grads, value

    return step


@pytest.mark.slow
def test_a_worker_that_stands_while_it_compiles_is_named():
    start(2)

    def loss(w, x):
        if in_worker():  # which traces once more
            time.sleep(600)
        return jnp.mean((x * w) ** 2)

    said = rf"no answer from worker_., worker_. for {STILL:g} s, while it compiles\n"
    with pytest.raises(HungError, match=said):
        parallel(loss)(jnp.float32(1), X)


@pytest.mark.stress
def test_one_worker_may_wait_for_another_that_compiles():
    """For longer than a worker may stand: it has compiled, and they meet."""
    start(2)

    def loss(w, x):
        if in_worker() and jax.process_index() == 0:
            end = time.monotonic() + 3 * STILL
            while time.monotonic() < end:
                pass
        return jnp.mean((x * w) ** 2)

    assert float(parallel(loss)(jnp.float32(1), X)[1]) == 1.0


@pytest.mark.stress
def test_the_first_step_may_take_as_long_as_any():
    start(1)

    def turned(n, x):
        return jax.lax.fori_loop(0, n, lambda _, h: jnp.cos(h), jnp.broadcast_to(x, 100_000))[0]

    tried = jax.jit(turned, static_argnums=0).lower(1000, 1.0).compile()
    began = time.monotonic()
    jax.block_until_ready(tried(1.0))
    turns = int(1000 * 3 * STILL / (time.monotonic() - began))

    @launcher.parallelize(method=launcher.DataParallel(), donate_argnums=())
    def step(w, x):
        value, grads = launcher.value_and_grad(lambda w: jnp.mean((x * w) ** 2))(w)
        return turned(turns, w - grads), value

    assert float(step(jnp.float32(1), X)[0]) == pytest.approx(0.739085, abs=1e-4)  # cos(x) = x
