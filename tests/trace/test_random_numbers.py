"""Random numbers of a loss: those of no example are drawn once, the others by each slice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_slices import BATCH, by_slices, check, normal, run

import launcher
from launcher.trace import trace_step

PARAMS = {"a": normal(4, 8) / 2, "b": normal(8, 3) / 2}
KEY, RAW = jax.random.key(4), jax.random.PRNGKey(5)
KEYS = {
    "made in the loss": lambda: jax.random.key(3),
    "captured": lambda: KEY,
    "captured, raw": lambda: RAW,
    "folded": lambda: jax.random.fold_in(KEY, 7),
    "split": lambda: jax.random.split(KEY)[1],
}


def error(p, x, y):
    return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] - y) ** 2)


def mixed(p, b, key):
    share = jax.random.beta(key, 0.4, 0.4)
    return error(p, share * b["x"] + (1 - share) * b["x"][::-1], b["t"])


def one_time(p, b, key):
    time = jax.random.uniform(key)
    return error(p, jnp.cos(time) * b["x"], b["t"])


def noisy_weights(p, b, key):
    noise = jax.random.normal(key, p["a"].shape)  # as many rows as the batch, by chance, or not
    return error({**p, "a": p["a"] + 0.1 * noise}, b["x"], b["t"])


def shared_mask(p, b, key):
    kept = jax.random.bernoulli(key, 0.5, (1, 8))
    h = jnp.where(kept, jnp.tanh(b["x"] @ p["a"]), 0)
    return jnp.mean((h @ p["b"] - b["t"]) ** 2)


def skipped_layer(p, b, key):
    h = jnp.tanh(b["x"] @ p["a"])
    h = jax.lax.cond(jax.random.bernoulli(key), lambda h: h, lambda h: 0.5 * h, h)
    return jnp.mean((h @ p["b"] - b["t"]) ** 2)


@pytest.mark.sampled(5, rest="stress")
@pytest.mark.parametrize(
    ("fun", "key"),
    [
        pytest.param(fun, key, marks=[] if fun is mixed or key == "captured" else [by_hand])
        for fun in (mixed, one_time, noisy_weights, shared_mask, skipped_layer)
        for key in KEYS
        for by_hand in [pytest.mark.stress]
    ],
)
def test_what_is_of_no_example_is_drawn_as_on_one_device(fun, key):
    check(lambda p, b: fun(p, b, KEYS[key]()), PARAMS, BATCH, 4)


@pytest.mark.parametrize("key", ["captured, raw", "split"])
def test_each_row_has_numbers_of_its_own_beside_those_of_all(key):
    def loss(p, b):
        first, second = jax.random.split(KEYS[key]())
        rows = jax.random.normal(first, (len(b["x"]), 2))
        return mixed(p, b, second), rows

    (_, rows), _, words = by_slices(loss, PARAMS, BATCH, 4, has_aux=True)
    assert words == ("mean", "concat")
    assert len(np.unique(rows)) == rows.size


def test_they_are_drawn_before_the_pipeline():
    def step(p, b):
        return launcher.value_and_grad(lambda p, b: one_time(p, b, jax.random.key(1)))(p, b)

    traced = trace_step(step, (PARAMS, BATCH))
    assert [e.primitive.name for e in traced.before].count("random_bits") == 1
    assert "random_bits" not in {e.primitive.name for e in traced.loss(4).equations}
    assert "random_bits at " in traced.loss(4).meaning


def split_on(p, b, key):
    key, sub = jax.random.split(key)
    return error(p, b["x"] + jax.random.normal(sub, (len(b["x"]), 1)), b["t"]), key


def passed_on(p, b, key):
    return error(p, b["x"] + jax.random.normal(key, (len(b["x"]), 1)), b["t"]), {"key": key}


def looped_on(p, b, key):
    key, _ = jax.lax.scan(lambda key, _: (jax.random.split(key)[0], None), key, None, length=3)
    return error(p, b["x"], b["t"]), key


@pytest.mark.sampled(5)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("key", [jax.random.key(4), jax.random.PRNGKey(5)], ids=["typed", "raw"])
@pytest.mark.parametrize("fun", [split_on, passed_on, looped_on])
def test_a_key_that_the_loss_returns_is_that_of_one_device(fun, key, count):
    def step(state, batch):
        (value, new), grads = launcher.value_and_grad(fun, has_aux=True)(
            state["params"], batch, state["key"]
        )
        return {"params": grads, "key": jax.tree.leaves(new)[0]}, value

    args = {"params": PARAMS, "key": key}, BATCH
    (state, _), _ = run(step, args, count)
    expected, _ = jax.jit(step)(*args)

    def data(key):
        is_typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(key) if is_typed else key

    np.testing.assert_array_equal(data(state["key"]), data(expected["key"]))


def test_numbers_that_are_drawn_in_a_loop_of_jaxs_own():
    def loss(p, b):
        counts = jax.random.poisson(KEY, 2.0, (3,)).astype(jnp.float32)
        return jnp.mean((b["x"] @ p["a"] @ p["b"]) * counts), counts

    check(loss, PARAMS, BATCH, 4, has_aux=True)
