"""What is made of the batch before the loss, and how it is cut into slices."""

import by_slices
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.trace import BatchError, trace_step

W = jax.ShapeDtypeStruct((4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((8, 4), jnp.float32)
N = jax.ShapeDtypeStruct((8,), jnp.int32)
TABLE = np.arange(12.0, dtype=np.float32).reshape(3, 4)


KEY = jax.random.key(0)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


def crop(row, key):
    return jax.lax.dynamic_slice(row, [jax.random.randint(key, (), 0, 3)], [2])


def sliced(prepare, slices=4):
    """Where the result of `prepare(x, n)`, computed before the loss, is cut."""

    def step(w, batch):
        made = prepare(*batch)
        return w, launcher.microbatched(lambda w, c: (c.astype(jnp.float32).sum()) * w.sum())(
            w, made
        )

    return trace_step(step, (W, (X, N))).loss(slices).slice_axes[1]


KEPT = {
    "elementwise": (lambda x, n: jnp.tanh(x) * 2 - x.mean(), 0),
    "transpose": (lambda x, n: (x - x.mean(0)).T, 1),
    "rows with their mean": (lambda x, n: x / jnp.linalg.norm(x, axis=1, keepdims=True), 0),
    "flattened": (lambda x, n: x.reshape(-1), 0),
    "split features": (lambda x, n: x.reshape(8 if x.shape[0] == 8 else 2, 2, 2), 0),
    "pairs of rows": (lambda x, n: x.reshape(-1, 2, 4), 0),
    "behind another axis": (lambda x, n: x.T.reshape(2, 2, -1), 2),
    "product": (lambda x, n: x @ x.T.mean(1), 0),
    "einsum": (lambda x, n: jnp.einsum("bi,bj->ijb", x, x), 2),
    "feature": (lambda x, n: x[:, 1], 0),
    "shifted features": (lambda x, n: jnp.pad(x[:, :-1], ((0, 0), (1, 0))), 0),
    "features joined": (lambda x, n: jnp.concatenate([x, x * 2, jnp.ones_like(x)], 1), 0),
    "features sorted": (lambda x, n: jnp.sort(x, axis=1)[:, ::-1], 0),
    "one-hot": (lambda x, n: jax.nn.one_hot(n, 3), 0),
    "looked up": (lambda x, n: jnp.asarray(TABLE)[n], 0),
    "own column": (lambda x, n: jnp.take_along_axis(x, n[:, None], axis=1), 0),
    "activation": (lambda x, n: jax.nn.relu(x), 0),
    "checkpointed": (lambda x, n: jax.checkpoint(jnp.sin)(x), 0),
    "branch": (lambda x, n: jax.lax.cond(n[0] > 0, jnp.sin, lambda x: x, x), 0),
    "mixed with others": (lambda x, n: x * 0.9 + x[::-1] * 0.1, 0),
    "noise": (lambda x, n: jax.random.normal(jax.random.key(0), x.shape), 0),
    "weights": (lambda x, n: np.ones(x.shape[0], np.float32), 0),
    "custom gradient": (lambda x, n: straight_through(x), 0),
    "resized": (lambda x, n: jax.image.resize(x[..., None], (len(x), 7, 1), "linear"), 0),
    "pooled": (lambda x, n: nn.max_pool(x[..., None], (2,)), 0),
    "transformed": (lambda x, n: jnp.abs(jnp.fft.rfft(x)), 0),
    "largest": (lambda x, n: jax.lax.top_k(x, 2)[0], 0),
    "element replaced": (lambda x, n: x.at[:, 0].set(1.0), 0),
    "elements added": (lambda x, n: x.at[:, jnp.array([0, 2])].add(x[:, :2]), 0),
    "patch replaced": (lambda x, n: jax.lax.dynamic_update_slice(x, 2 * x[:, :2], (0, 1)), 0),
    "cropped one by one": (lambda x, n: jax.vmap(crop)(x, jax.random.split(KEY, len(x))), 0),
    "flipped one by one": (
        lambda x, n: jnp.where(jax.random.bernoulli(KEY, 0.5, (len(x), 1)), x[:, ::-1], x),
        0,
    ),
    "masked": (lambda x, n: (n != 0) / (n != 0).sum(), 0),
    "patches": (lambda x, n: x.reshape(len(x), 2, 2).transpose(0, 2, 1).reshape(len(x), -1), 0),
    "element replaced one by one": (
        lambda x, n: jax.vmap(lambda row, k: row.at[k].set(0.0))(x, n),
        0,
    ),
    "bits": (lambda x, n: jax.lax.bitcast_convert_type(x, jnp.int32), 0),
    "bytes": (lambda x, n: jax.lax.bitcast_convert_type(x, jnp.uint8), 0),
    "mapped": (lambda x, n: jax.lax.map(jnp.sin, x), 0),
    "one number": (lambda x, n: x.std(), None),
    "first row": (lambda x, n: x[0], None),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", KEPT)
def test_rows_in_order_are_cut(name):
    prepare, axis = KEPT[name]
    assert sliced(prepare) == axis


# Computed on the whole batch and cut afterwards: in whatever order the examples are then.
ANY_ORDER = {
    "reversed": lambda x, n: x[::-1],
    "rolled": lambda x, n: jnp.roll(x, 1, axis=0),
    "shuffled": lambda x, n: jax.random.permutation(jax.random.key(0), x),
    "gathered": lambda x, n: x[n],
    "sorted": lambda x, n: jnp.sort(x, axis=0),
    "two halves": lambda x, n: jnp.concatenate([x, x + 1]),
    "regrouped": lambda x, n: x.reshape(2, -1, 4),
    "interleaved": lambda x, n: x.reshape(2, -1, 4).swapaxes(0, 1).reshape(-1, 4),
    "summed along": lambda x, n: jnp.cumsum(x, 0),
    "row numbers": lambda x, n: jnp.arange(x.shape[0]),
    "a shuffle": lambda x, n: jax.random.permutation(jax.random.key(0), 8)[: len(x)],
    "real and fake": lambda x, n: jnp.repeat(
        jnp.array([0.0, 1.0]), len(x), total_repeat_length=2 * len(x)
    ),
    "number of rows": lambda x, n: np.full(3, len(x)),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", ANY_ORDER)
def test_what_is_made_of_the_batch_is_cut_in_any_order(name):
    def step(w, batch):
        made = ANY_ORDER[name](*batch).astype(jnp.float32)

        def loss(w, c, x):
            aligned = (
                x if name in ("two halves", "regrouped", "number of rows", "real and fake") else c
            )
            return (c * w[0, 0]).sum() + (aligned.reshape(len(x), -1).sum(1) * (x @ w).sum(1)).sum()

        return launcher.value_and_grad(loss)(w, made, batch[0])

    batch = (np.arange(32.0, dtype=np.float32).reshape(8, 4) / 16, np.arange(8) * 3 % 8)
    by_slices.compare(step, (np.ones((4, 4), np.float32), batch), 4)


REFUSED = {
    "products of rows": (lambda x, n: x @ x.T, "grow along one axis"),
    "another program": (
        lambda x, n: x if len(x) < 4 else x.reshape(-1, 2, 2),
        "must grow along one axis",
    ),
    "fixed shape": (lambda x, n: x.reshape(8, 2, 2), r"8, 2, 2.*write -1 in reshape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_grow_with_the_batch_is_refused(name):
    prepare, words = REFUSED[name]
    assert sliced(prepare, slices=1) is None
    with pytest.raises(BatchError, match=words):
        sliced(prepare)
