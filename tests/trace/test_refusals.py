"""What several slices cannot mean is refused: the whole text, with the user's line."""

import re

import jax
import jax.numpy as jnp
import pytest
from by_slices import BATCH, by_slices, normal

from launcher.trace.errors import BatchError, JoinedError, ReduceError

WEIGHTS = normal(4, 3)
SLICES = "2 slices of the batch (microbatches × data-parallel replicas)"
JOINED = (
    "the loss is not a mean, a sum or a row of each example: {what} at HERE joins examples, of "
    f"which each of {SLICES} sees only its own. Ask for one microbatch, compute it from the batch "
    "alone, or mark the function with launcher.per_slice if a slice's own value is meant"
)


@jax.custom_vjp
def centred(x):
    return x


centred.defvjp(lambda x: (x, None), lambda _, g: (g - g.mean(0),))


def net(p, b):
    return b["x"] @ p


def root(p, b):
    return jnp.sqrt(jnp.mean((net(p, b) - b["t"]) ** 2))


def contrastive(p, b):
    scores = net(p, b) @ b["t"].T
    return -jnp.diag(jax.nn.log_softmax(scores)).mean()


def worst(p, b):
    return jnp.max((net(p, b) - b["t"]) ** 2)


def by_rule(p, b):
    return jnp.mean(centred(net(p, b)) * b["t"])


def mean(p, b):
    return jnp.mean(net(p, b) * b["t"])


def total(p, b):
    return jnp.sum(net(p, b) * b["t"])


def with_deviation(p, b):
    y = net(p, b)
    return y.mean(), y.std()


def with_columns(p, b):
    return mean(p, b), net(p, b).T


def with_rows(p, b):
    return mean(p, b), net(p, b)


def fixed_size(p, b):
    return jnp.mean(net(p, b) * b["t"] * jnp.ones((8, 3)))


CASES = [
    (root, {}, JoinedError, JOINED.format(what="sqrt"), 1),
    (contrastive, {}, JoinedError, JOINED.format(what="dot_general"), 1),
    (by_rule, {}, JoinedError, JOINED.format(what="the derivative rule of custom_vjp_call"), 1),
    (
        worst,
        {},
        JoinedError,
        "the loss takes the max over the examples at HERE, so that its gradient belongs to one of "
        f"{SLICES}. Ask for one microbatch, or for a mean or a sum",
        1,
    ),
    (
        with_deviation,
        {"has_aux": True},
        JoinedError,
        JOINED.replace("the loss is", "result 1 of the loss is").format(what="sub"),
        2,
    ),
    (
        total,
        {"reduce": "mean"},
        ReduceError,
        "the loss is a sum over the examples, reduced at HERE, but "
        'reduce="mean" was given; say "sum", or leave reduce out',
        1,
    ),
    (
        mean,
        {"reduce": "sum"},
        ReduceError,
        "the loss is a mean over the examples, reduced at HERE, but "
        'reduce="sum" was given; say "mean", or leave reduce out',
        1,
    ),
    (
        with_rows,
        {"has_aux": True, "reduce": ("mean", "mean")},
        ReduceError,
        'result 1 of the loss is a row of each example, but reduce="mean" was given; say '
        '"concat", or leave reduce out',
        None,
    ),
    (
        with_rows,
        {"has_aux": True, "reduce": ("mean", "last")},
        BatchError,
        'result 1 of the loss grows with the batch, and reduce="last" would keep one slice\'s '
        'rows; say "concat", or leave reduce out',
        None,
    ),
    (
        with_columns,
        {"has_aux": True},
        BatchError,
        "result 1 of the loss cannot be combined from 2 slices of the batch; transpose it, so that "
        "the examples come first",
        None,
    ),
    (
        fixed_size,
        {},
        BatchError,
        "the step cannot be traced on one of 2 slices of the batch, 4 rows (TypeError: mul got "
        "incompatible shapes for broadcasting: (4, 3), (8, 3).); it may hold the batch size as a "
        "number: read it off a shape, or write -1 in reshape",
        None,
    ),
]


@pytest.mark.parametrize(
    ("fun", "options", "error", "text", "below"), CASES, ids=[c[0].__name__ for c in CASES]
)
def test_the_whole_text(fun, options, error, text, below):
    with pytest.raises(error) as refused:
        by_slices(fun, WEIGHTS, BATCH, 2, **options)
    assert type(refused.value) is error
    place = re.compile(r"\S*test_refusals\.py:(\d+):\d+ \([\w.<>]+\)")
    found = str(refused.value)
    assert place.sub("HERE", found) == text
    lines = [int(line) for line in place.findall(found)]
    assert lines == ([] if below is None else [fun.__code__.co_firstlineno + below])
