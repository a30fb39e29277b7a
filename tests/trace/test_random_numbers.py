"""Random numbers of a loss: each slice draws those that one device draws for its rows."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_slices import BATCH, by_slices, check, normal, run

import launcher
from launcher.trace import BatchError
from launcher.trace.ir.threefry import block_generator, places

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


@pytest.mark.sampled(7)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("fun", [mixed, one_time, noisy_weights, shared_mask, skipped_layer])
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


def rows_of(p, b):
    return jnp.tanh(b["x"] @ p["a"])


def dropped(key, h):
    return jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h / 0.7, 0)


def in_scan(p, b):
    layer = lambda h, key: (dropped(key, h) + 0.1, None)  # noqa: E731
    return jax.lax.scan(layer, rows_of(p, b), jax.random.split(KEY, 3))[0]


def in_scan_of_scans(p, b):
    inner = lambda h, key: (dropped(key, h), None)  # noqa: E731
    outer = lambda h, keys: (jax.lax.scan(inner, h, keys)[0] + p["a"][0], None)  # noqa: E731
    return jax.lax.scan(outer, rows_of(p, b), jax.random.split(KEY, (3, 2)))[0]


def in_carried_key(p, b):
    def layer(carried, _):
        h, key = carried
        key, own = jax.random.split(key)
        return (dropped(own, h) + 0.1, key), jax.random.normal(key)

    (h, _), shared = jax.lax.scan(layer, (rows_of(p, b), KEY), None, length=3)
    return h + shared.sum()


def in_while(p, b):
    def body(carried):
        i, x = carried
        return i + 1, dropped(jax.random.fold_in(KEY, i), x) + 0.1

    return jnp.tanh(jax.lax.while_loop(lambda c: c[0] < 3, body, (0, b["x"]))[1] @ p["a"])


def in_branch(p, b):
    first, second = jax.random.split(KEY)
    one, other = (lambda h: dropped(first, h)), (lambda h: 2 * dropped(second, h))
    return jax.lax.cond(p["a"][0, 0] > 0, one, other, rows_of(p, b))


def in_checkpoint(p, b):
    layer = jax.checkpoint(lambda h, key: (dropped(key, jnp.tanh(h)), None))
    return jax.lax.scan(layer, rows_of(p, b), jax.random.split(RAW, 2))[0]


def of_each_example(p, b):
    h = rows_of(p, b)
    h = jax.vmap(dropped)(jax.random.split(KEY, len(h)), h)
    return jax.vmap(jax.random.permutation)(jax.random.split(RAW, len(h)), h)


def of_each_head(p, b):
    h = rows_of(p, b)
    return h + jax.vmap(lambda key: jax.random.normal(key, h.shape))(jax.random.split(KEY)).sum(0)


def along_other_axes(p, b):
    h = dropped(KEY, rows_of(p, b).T).T
    return h + jax.random.normal(RAW, (h.size,), jnp.bfloat16).reshape(h.shape)


def chosen(p, b):
    h, labels = rows_of(p, b), len(p["b"])
    some = jax.random.choice(KEY, labels, (len(h),), p=jnp.arange(1.0, labels + 1) / 36)
    small = jax.random.randint(RAW, h.shape, 0, 5, jnp.int8)
    return h * jax.nn.one_hot(some, labels) + small * jax.random.gamma(KEY, 2.0, (len(h), 1))


def masked(p, b):
    """The number of examples that count is drawn in a loop, too."""
    thin = lambda mask, key: (mask * jax.random.bernoulli(key, 0.9, mask.shape), None)  # noqa: E731
    mask, _ = jax.lax.scan(thin, jnp.ones(len(b["x"])), jax.random.split(KEY))
    return rows_of(p, b) * (mask / mask.sum())[:, None]


DRAWN = (
    *(in_scan, in_scan_of_scans, in_carried_key, in_while, in_branch, in_checkpoint),
    *(of_each_example, of_each_head, along_other_axes, chosen, masked),
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("rows", DRAWN)
def test_each_slice_draws_what_one_device_draws_for_its_rows(rows, count):
    def loss(p, b):
        h = rows(p, b)
        return jnp.mean((h @ p["b"] - b["t"]) ** 2), h

    assert check(loss, PARAMS, BATCH, count, has_aux=True) == ("mean", "concat")


@jax.custom_vjp
def with_rule(key, h):
    return dropped(key, h)


with_rule.defvjp(lambda key, h: (dropped(key, h), key), lambda key, g: (None, dropped(key, g)))


@launcher.per_slice
def centred(key, h):
    return h - h.mean(0) + jax.random.normal(key, h.shape)


@launcher.per_slice
def centred_in_loop(keys, h):
    return jax.lax.scan(lambda h, key: (centred(key, h), None), h, keys)[0]


OTHER = jax.random.key(5, impl="rbg")
OWN = {
    "another generator": lambda h: dropped(OTHER, h),
    "another generator, in a loop": lambda h: jax.lax.fori_loop(
        0, 2, lambda i, h: dropped(jax.random.fold_in(OTHER, i), h), h
    ),
    "a rule of derivatives": lambda h: with_rule(KEY, h),
    "a rule of derivatives, raw key": lambda h: with_rule(RAW, h),
    "per slice": lambda h: centred(KEY, h),
    "per slice, in a loop, raw keys": lambda h: centred_in_loop(jax.random.split(RAW), h),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", OWN)
def test_other_numbers_are_each_slices_own(kind):
    """No two slices see the same."""

    def loss(p, b):
        drawn = OWN[kind](jnp.ones((len(b["x"]), 64)))
        return error(p, b["x"], b["t"]), drawn

    (_, drawn), _, _ = by_slices(loss, PARAMS, BATCH, 4, has_aux=True)
    assert len({part.tobytes() for part in np.split(np.asarray(drawn), 4)}) == 4


def test_a_key_made_in_a_function_with_a_rule_is_refused():
    def loss(p, b):
        return jnp.mean((with_key(rows_of(p, b)) @ p["b"] - b["t"]) ** 2)

    with pytest.raises(BatchError, match="joins examples"):
        by_slices(loss, PARAMS, BATCH, 4)


@jax.custom_vjp
def with_key(h):
    return dropped(jax.random.key(0), h)


with_key.defvjp(lambda h: (with_key(h), None), lambda _, g: (with_key(g),))


def masked_by_another(p, b):
    mask = jax.random.bernoulli(OTHER, 0.7, (len(b["x"]),)) * b["mask"]
    errors = ((rows_of(p, b) @ p["b"] - b["t"]) ** 2).mean(1)
    return (errors * mask).sum() / jnp.maximum(mask.sum(), 1)


def test_a_count_and_what_it_counts_are_of_the_same_numbers():
    check(masked_by_another, PARAMS, BATCH, 4)


BLOCKS = [  # a block's shape, the axis of the blocks, their rows in all, the block's number
    ((2, 5), 0, 8, 3),
    ((3, 2, 4), 1, 8, 2),
    ((2, 5), 0, 2**31, 2**30 - 3),
    ((3, 2, 2**10), 1, 2**30, 12345678),
    ((2, 2**16, 7), 0, 2**20, 77),
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_places_of_a_block_are_those_in_all_blocks(block):
    """They count more elements than a word does."""
    shape, axis, rows, number = block
    high, low = places(jnp.uint32(number), shape, axis, rows)
    index = list(np.indices(shape, dtype=np.uint64))
    index[axis] += np.uint64(number * shape[axis])
    whole = [rows if d == axis else n for d, n in enumerate(shape)]
    want = sum(x * np.uint64(math.prod(whole[d + 1 :])) for d, x in enumerate(index))
    found = np.asarray(high).astype(np.uint64) << np.uint64(32) | np.asarray(low)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_a_block_is_that_of_the_whole_draw(dtype):
    whole = jax.random.bits(KEY, (3, 8, 5), dtype)
    for number in range(4):
        words = jnp.append(jax.random.key_data(KEY), jnp.uint32(number))
        placed = jax.random.wrap_key_data(words, impl=block_generator(1, 8))
        want = whole[:, 2 * number : 2 * number + 2]
        np.testing.assert_array_equal(jax.random.bits(placed, (3, 2, 5), dtype), want)


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
