"""Real and fake examples in one array: by slices as on the whole batch, or refused."""

import by_slices
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_slices import BATCH, PARAMS, ROWS, check, net, normal

import launcher
from launcher.trace import BatchError

softplus = jax.nn.softplus
P = PARAMS | {"bias": normal(3)}
B = BATCH | {"pairs": normal(2 * ROWS, 4).reshape(ROWS, 2, 4), "key": jax.random.key(0)}


def made(p, b):
    """Examples that depend on the parameters."""
    return jnp.tanh(b["t"] @ p["b"].T) @ p["a"].T


def both(p, b, axis=0):
    return jnp.concatenate([b["x"], made(p, b)], axis)


def told(p, b):
    return net(p, {"x": both(p, b)}) + p["bias"]


def labels(b):
    return jnp.concatenate([jnp.ones(len(b["x"])), jnp.zeros(len(b["x"]))])


def halves(p, b):
    return jnp.split(told(p, b), 2)


def dropped(p, b):
    h = told(p, b)
    keep = jax.random.bernoulli(jax.random.key(3), 1.0, h.shape)
    return jnp.where(keep, h, 0.0)


def three(p, b):
    """A part is twice as long as the others."""
    twice = b["pairs"].reshape(-1, 4)
    return net(p, {"x": jnp.concatenate([made(p, b), twice, both(p, b)])})


def by_class(p, b):
    each = jnp.concatenate([b["label"], b["label"][::-1]])
    return optax.softmax_cross_entropy_with_integer_labels(told(p, b), each).mean()


def by_columns(p, b):
    """A scan over columns, each of which holds the rows of both."""
    return jax.lax.scan(lambda c, y: (c + (y * labels(b)).mean(), y), 0.0, told(p, b).T)[0]


EQUAL = {
    "mean": lambda p, b: (told(p, b) ** 2).mean(),
    "sum": lambda p, b: (told(p, b) ** 2).sum(),
    "split": lambda p, b: softplus(-halves(p, b)[0]).mean() + softplus(halves(p, b)[1]).mean(),
    "sliced": lambda p, b: (
        softplus(-told(p, b)[: len(b["x"]), 0]).sum() - told(p, b)[len(b["x"]) :].sum()
    ),
    "labels": lambda p, b: optax.sigmoid_binary_cross_entropy(
        told(p, b)[:, 0], 0.9 * labels(b)
    ).mean(),
    "labels in a column": lambda p, b: ((told(p, b) - labels(b)[:, None]) ** 2).mean(),
    "labels of classes": by_class,
    "weights of the batch": lambda p, b: (
        told(p, b)[:, 0] * jnp.concatenate([b["weight"], b["mask"]])
    ).sum(),
    "masked mean": lambda p, b: (told(p, b)[:, 0] * labels(b)).sum() / labels(b).sum(),
    "relative": lambda p, b: softplus(halves(p, b)[1] - halves(p, b)[0]).mean(),
    "two views": lambda p, b: jnp.multiply(
        *jnp.split(net(p, {"x": jnp.concatenate([b["x"], 2 * b["x"]])}), 2)
    ).mean(),
    "draws": lambda p, b: dropped(p, b).mean(),
    "flattened": lambda p, b: jnp.split(told(p, b).reshape(-1), 2)[1].mean(),
    "parts of parts": lambda p, b: (
        three(p, b)[len(b["x"]) : 4 * len(b["x"])][: 2 * len(b["x"])] * b["pairs"].reshape(-1, 4)[:, :3]
    ).sum() + three(p, b).mean(),
    "checkpointed": jax.checkpoint(lambda p, b: (told(p, b) * labels(b)[:, None]).mean()),
    "vmap": lambda p, b: jax.vmap(lambda x, t: jnp.sum(net(p, {"x": x}) * t))(
        both(p, b), labels(b)
    ).mean(),
    "by columns": by_columns,
    "a loop": lambda p, b: jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y), told(p, b)).mean(),
    "a branch": lambda p, b: jax.lax.cond(
        b["mask"].sum() > 2, lambda y: 2 * y, jnp.tanh, told(p, b)
    ).mean(),
    "beside the batch": lambda p, b: (halves(p, b)[1] * b["t"]).sum(),
    "largest": lambda p, b: jax.nn.logsumexp(told(p, b), -1).mean(),
    "one array": lambda p, b: (jnp.concatenate([told(p, b)[: len(b["x"])]]) * b["t"]).sum(),
}


@pytest.mark.parametrize("count", [2, 4, ROWS])
@pytest.mark.parametrize("name", EQUAL)
def test_equal(name, count):
    check(EQUAL[name], P, B, count)
