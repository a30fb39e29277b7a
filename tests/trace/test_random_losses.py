"""Random losses of per-example parts, masks, reductions, ratios and pieces that join examples."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_slices import BATCH, ROWS, check, normal

from launcher.trace import BatchError

SEEDS, GROUP = 300, 20
PARAMS = {"w": normal(4, 3), "s": np.float32(0.5)}


def with_backward(backward):
    """A function that changes nothing but the gradient."""
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, x), lambda x, g: (backward(x, g),))
    return function


clipped = with_backward(lambda x, g: jnp.clip(g, -0.02, 0.02))
weighted = with_backward(lambda x, g: g * jnp.tanh(x))
normalized = with_backward(lambda x, g: g / (0.1 + jnp.linalg.norm(g)))


def rows_of(p, b, rng):
    """A value of each example."""
    y = jnp.tanh(b["x"] @ p["w"])
    choices = [
        lambda: y.sum(1),
        lambda: jnp.square(y).mean(1),
        lambda: y[jnp.arange(len(y)), b["label"]],
        lambda: jax.nn.logsumexp(y, 1) * b["mask"],
        lambda: jnp.where(b["mask"] > 0, y[:, 0], 0.0),
        lambda: y.max(1) * b["weight"] / b["weight"].sum(),
        lambda: y[:, 1] * (b["x"] - b["x"].mean(0))[:, 0],
        lambda: y[:, 0] * jnp.arange(len(y)),
        lambda: b["weight"] * b["mask"],
        lambda: clipped(y).sum(1),
        lambda: weighted(y[:, 1]) * b["weight"],
        lambda: y[:, 0] * jax.random.uniform(jax.random.key(rng.randrange(9))),
        lambda: y @ jax.random.normal(jax.random.key(rng.randrange(9)), (3,)),
        lambda: normalized(y).sum(1),  # joins, in its gradient
        lambda: y[:, 0] - y[:, 0].mean(),  # joins
        lambda: y[::-1, 0] * b["weight"],  # joins
        lambda: jax.nn.softmax(y[:, 2]),  # joins
        lambda: y @ y.mean(0),  # joins
    ]
    return rng.choice(choices)()


def number_of(p, b, rng, depth):
    """A number of the whole batch."""
    choices = [
        lambda: rows_of(p, b, rng).mean(),
        lambda: rows_of(p, b, rng).sum(),
        lambda: rows_of(p, b, rng).sum() / b["mask"].sum(),
        lambda: rows_of(p, b, rng).sum() / len(b["x"]),
        lambda: jnp.average(rows_of(p, b, rng), weights=b["weight"]),
        lambda: jnp.mean(rows_of(p, b, rng), where=b["mask"] > 0),
        lambda: jnp.sum(p["w"] ** 2) * p["s"],
        lambda: b["weight"].max() * p["s"],
        lambda: jnp.float32(len(b["x"])),
        lambda: rows_of(p, b, rng).max(),  # joins, as a loss
        lambda: jnp.sqrt(1 + rows_of(p, b, rng).mean() ** 2),  # joins
    ]
    if depth:
        one, two = (lambda: number_of(p, b, rng, depth - 1),) * 2
        choices += 2 * [
            lambda: one() + two(),
            lambda: one() - 0.5 * two(),
            lambda: one() * p["s"],
            lambda: one() * two(),  # joins, if both are of the parameters and the batch
            lambda: one() / (2 + b["mask"].sum()),
            lambda: jnp.where(b["mask"].sum() > 4, one(), two()),
            lambda: jnp.stack([one(), two()]) @ jnp.array([1.0, 2.0]),
        ]
    return rng.choice(choices)()


def metric_of(p, b, rng):
    """A number that is reported beside the loss, or a row of each example."""
    number = number_of(p, b, rng, 1)
    choices = [
        lambda: number,
        lambda: jnp.exp(number / 9),
        lambda: number / (1 + jnp.abs(number_of(p, b, rng, 0))),
        lambda: -rows_of(p, b, rng).min(),
        lambda: rows_of(p, b, rng),
    ]
    return rng.choice(choices)()


def outcome(seed):
    def fun(p, b):
        rng = random.Random(seed)
        return number_of(p, b, rng, 3), metric_of(p, b, rng)

    try:
        check(fun, PARAMS, BATCH, random.Random(seed).choice([2, 4, ROWS]), has_aux=True)
    except BatchError:
        return "refused"
    return "equal"


@pytest.mark.sampled(15)
@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_random_losses_are_equal_or_refused(first):
    found = [outcome(seed) for seed in range(first, first + GROUP)]
    assert found.count("equal") >= 3
