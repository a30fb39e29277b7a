"""A step of two stages, and threads that call it."""

import threading
import time

import jax.numpy as jnp
import numpy as np

import launcher

NET = [np.eye(8, 16, dtype=np.float32) / 2, np.eye(16, 8, dtype=np.float32) / 2]
PATIENCE = 120.0  # for threads: what they wait for ends before


def loss(net, x):
    h = jnp.tanh(x @ net[0])
    launcher.mark_pipeline_boundary()
    return jnp.mean((h @ net[1] - x) ** 2)


def step(net, x):
    value, grads = launcher.value_and_grad(loss)(net, x)
    return [w - 0.1 * g for w, g in zip(net, grads, strict=True)], value


def batch(thread):
    """Return the batch of a thread, by which its results are known; odd ones have fewer rows."""
    return np.full((8 if thread % 2 else 16, 8), 1 + thread, np.float32)


def in_threads(count, work):
    """Return what `work(thread)` returns or raises in each of so many threads."""
    found = [None] * count

    def run(thread):
        try:
            found[thread] = work(thread)
        except Exception as error:
            found[thread] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads)
    return found
