"""A user's model of two layers, in whose processes one thing is slow: `options.slow` says which."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import jax
import jax.numpy as jnp

import launcher
from launcher.checkpoint import Background
from launcher.recipes import Model
from launcher.runtime.transport.pull import PullTransport
from launcher.train import worker

AHEAD = 500_000_000  # ns
TURNS = 4000  # of a slow stage, whose price is that of one or two
TRANSFER_SECONDS, SAVE_SECONDS, DATA_SECONDS = 0.1, 1.0, 1.0


def build(options, precision):
    _SLOW.get(options.slow, lambda: None)()

    def init(key):
        each = jax.random.split(key)
        return [jax.random.normal(k, (options.input_size,) * 2) / 8 for k in each]

    def loss(params, batch, key):
        first, second = params
        x = jnp.tanh(batch["x"] @ first)
        launcher.mark_pipeline_boundary()
        y = jnp.tanh(x @ second)
        if options.slow == "stage":
            y += 0 * turned(jax.lax.stop_gradient(x), jax.lax.stop_gradient(second))
        return jnp.mean((y - batch["y"]) ** 2), {}

    return Model(init, loss)


def turned(h, w):
    def body(carry):
        k, y = carry
        return k + 1, jnp.tanh(y @ w)

    _, y = jax.lax.while_loop(lambda carry: carry[0] < TURNS, body, (0, h))
    return jax.lax.stop_gradient(y)


def _slow_link():
    """Arrays are offered to the other process one after the other, each for some time."""
    send, wire = PullTransport.send, ThreadPoolExecutor(1, thread_name_prefix="wire")

    def held(self, key, arrays):
        jax.block_until_ready(arrays)
        time.sleep(TRANSFER_SECONDS)
        send(self, key, arrays)

    def late(self, key, arrays):
        wire.submit(held, self, key, arrays)

    PullTransport.send = late


def _slow_saves():
    save = Background.save

    def late(*given):
        time.sleep(SAVE_SECONDS)
        save(*given)

    Background.save = late


def _slow_data():
    own_rows = worker.own_rows

    def late(*given):
        rows = own_rows(*given)

        def at(index):
            time.sleep(DATA_SECONDS)
            return rows(index)

        return at

    worker.own_rows = late


def _clock_ahead():
    """The clock of one worker is ahead: of the first that finds no mark of another."""
    if not sys.argv[0].endswith("default_worker.py"):  # this is the driver
        return
    with suppress(FileExistsError), open(os.environ["SLOW_NET_MARK"], "x"):
        now = time.time_ns
        time.time_ns = lambda: now() + AHEAD


_SLOW = {"link": _slow_link, "save": _slow_saves, "data": _slow_data, "clock": _clock_ahead}
