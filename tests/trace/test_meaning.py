"""A loss means on slices what it means on the whole batch: equal, or refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_slices import BATCH, PARAMS, ROWS, by_slices, check, losses, net

import launcher
from launcher.trace import BatchError, trace_step


def decay(p):
    return 0.1 * sum(jnp.sum(x**2) for x in jax.tree.leaves(p))


def rows(b):
    return b["x"].shape[0]


def scanned(values):
    return jax.lax.scan(lambda c, k: (c + values[:, k].mean(), None), 0.0, jnp.arange(3))[0]


def standardized(x):
    return (x - x.mean(0)) / x.std(0)


EQUAL = {
    # sums, means, and both
    "mean": lambda p, b: losses(p, b).mean(),
    "sum": lambda p, b: losses(p, b).sum(),
    "sum over a number": lambda p, b: losses(p, b).sum() / ROWS,
    "sum over the rows": lambda p, b: losses(p, b).sum() / rows(b),
    "sum times a share": lambda p, b: losses(p, b).sum() * (1 / rows(b)),
    "rows over their number": lambda p, b: (losses(p, b) / rows(b)).sum(),
    "mean and decay": lambda p, b: losses(p, b).mean() + decay(p),
    "sum and decay": lambda p, b: losses(p, b).sum() + decay(p),
    "sum and a decay for each": lambda p, b: losses(p, b).sum() + decay(p) * rows(b),
    "checkpointed sum and decay": jax.checkpoint(lambda p, b: losses(p, b).sum() + decay(p)),
    "decay less sum": lambda p, b: decay(p) - losses(p, b).sum(),
    "mean and sum": lambda p, b: losses(p, b).mean() + 0.1 * losses(p, b).sum(),
    "decay alone": lambda p, b: decay(p),
    "number of rows": lambda p, b: losses(p, b).mean() / np.log(rows(b)) + rows(b),
    "mean of means": lambda p, b: jnp.sum(net(p, b).mean(0) * jnp.arange(3.0)),
    "inner product": lambda p, b: jnp.vdot(net(p, b), b["t"]),
    "by class": lambda p, b: jax.ops.segment_sum(losses(p, b), b["label"], 3) @ jnp.arange(3.0),
    # masks and weights
    "masked mean": lambda p, b: (losses(p, b) * b["mask"]).sum() / b["mask"].sum(),
    "guarded": lambda p, b: (losses(p, b) * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1),
    "mean where": lambda p, b: jnp.mean(losses(p, b), where=b["mask"] > 0),
    "average": lambda p, b: jnp.average(losses(p, b), weights=b["weight"]),
    "weights of sum one": lambda p, b: (losses(p, b) * (b["weight"] / b["weight"].sum())).sum(),
    "or else zero": lambda p, b: jnp.where(
        b["mask"].sum() > 9, (losses(p, b) * b["mask"]).sum() / b["mask"].sum(), 0.0
    ),
    "masked mean and decay": lambda p, b: (
        (losses(p, b) * b["mask"]).sum() / b["mask"].sum() + decay(p)
    ),
    "mean over the classes seen": lambda p, b: (
        losses(p, b) / jnp.bincount(b["label"], length=3)[b["label"]]
    ).sum(),
    # what the batch alone decides
    "standardized inputs": lambda p, b: losses(p, {**b, "x": standardized(b["x"])}).mean(),
    "reversed targets": lambda p, b: ((net(p, b) - b["t"][::-1]) ** 2).mean(),
    "sorted weights": lambda p, b: (losses(p, b) * jnp.sort(b["weight"])).mean(),
    "mixup": lambda p, b: losses(p, {**b, "x": 0.7 * b["x"] + 0.3 * b["x"][::-1]}).mean(),
    "similarities of inputs": lambda p, b: (losses(p, b) * (b["x"] @ b["x"].T).max(1)).mean(),
    "row numbers": lambda p, b: (losses(p, b) * jnp.arange(rows(b))).mean(),
    "a range of rows": lambda p, b: (losses(p, b) * (jnp.arange(rows(b)) < 5)).mean(),
    "a choice": lambda p, b: jax.lax.cond(
        b["mask"].sum() > 2, lambda y: y.mean(), lambda y: 2 * y.mean(), net(p, b)
    ),
    # each example on its own
    "row and label": lambda p, b: (
        -jax.nn.log_softmax(net(p, b))[jnp.arange(rows(b)), b["label"]].mean()
    ),
    "label of each": lambda p, b: (
        -jnp.take_along_axis(jax.nn.log_softmax(net(p, b)), b["label"][:, None], 1).mean()
    ),
    "vmap": lambda p, b: jax.vmap(lambda x, t: jnp.sum((net(p, {"x": x}) - t) ** 2))(
        b["x"], b["t"]
    ).mean(),
    "map": lambda p, b: jax.lax.map(lambda x: net(p, {"x": x}).sum(), b["x"]).mean(),
    "scan over columns": lambda p, b: scanned(net(p, b)),
    "checkpoint": jax.checkpoint(lambda p, b: ((net(p, b) - b["t"]) ** 2).sum() / rows(b)),
    "flattened": lambda p, b: (net(p, b).reshape(-1) * b["t"].reshape(-1)).mean(),
    "examples last": lambda p, b: jnp.mean(net(p, b).T * b["t"].T),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", EQUAL)
def test_equal(name):
    check(EQUAL[name], PARAMS, BATCH, 4)


JOINED = {
    "ratio": (lambda p, b: net(p, b).sum() / (net(p, b) ** 2).sum(), "div"),
    "standard deviation": (lambda p, b: net(p, b).std(), "sub"),
    "softmax over the batch": (lambda p, b: (jax.nn.softmax(net(p, b), 0) * b["t"]).sum(), "sub"),
    "sorted": (lambda p, b: (jnp.sort(losses(p, b)) * b["weight"]).sum(), "sort"),
    "batch norm": (lambda p, b: (standardized(net(p, b)) * b["t"]).mean(), "sub"),
    "squares of sums": (lambda p, b: (net(p, b).mean(0) ** 2).sum(), "square|integer_pow"),
    "class sums squared": (
        lambda p, b: (jax.ops.segment_sum(losses(p, b), b["label"], 3) ** 2).sum(),
        "square|integer_pow",
    ),
    "halves": (
        lambda p, b: (net(p, b)[: rows(b) // 2] * net(p, b)[rows(b) // 2 :]).mean(),
        "slice",
    ),
    "next row": (lambda p, b: (net(p, b)[1:] * b["t"][:-1]).mean(), "slice"),
    "cumulated": (lambda p, b: (jnp.cumsum(losses(p, b)) * b["weight"]).mean(), "cumsum"),
    "loop of the loss": (
        lambda p, b: (
            jax.lax.while_loop(
                lambda c: c[1] < 3, lambda c: (c[0], c[1] + 1), (losses(p, b).sum(), 0)
            )[0]
            ** 2
        ),
        "integer_pow|square",
    ),
    "another program on few rows": (
        lambda p, b: net(p, b).mean() if rows(b) < 5 else net(p, b).sum(),
        "another program on a slice",
    ),
    "sum or mean": (
        lambda p, b: jax.lax.cond(b["mask"].sum() > 2, jnp.sum, jnp.mean, net(p, b)),
        "cond",
    ),
}


@pytest.mark.sampled(3, rest="slow")
@pytest.mark.parametrize("name", JOINED)
def test_refused(name):
    fun, words = JOINED[name]
    with pytest.raises(BatchError, match=words) as refused:
        by_slices(fun, PARAMS, BATCH, 2)
    assert re.search(r" at .*(test_meaning\.py|by_slices\.py|numpy|nn).*", str(refused.value))


def aux(p, b):
    hits = net(p, b).argmax(1) == b["label"]
    return losses(p, b).mean(), {
        "hits": hits.sum(),
        "accuracy": hits.mean(),
        "worst": losses(p, b).max(),
        "best": losses(p, b).min(),
        "all right": hits.all(),
        "outputs": net(p, b),
        "tokens": b["mask"].sum(),
        "norm": optax.tree.norm(p),
        "hits of the masked": (hits * b["mask"]).sum() / b["mask"].sum(),
        "spread of inputs": b["x"].std(),
        "total": losses(p, b).sum(),
    }


def test_metrics_of_every_kind():
    words = check(aux, PARAMS, BATCH, 4, has_aux=True)
    keys = sorted(aux(PARAMS, BATCH)[1])
    assert dict(zip(keys, words[1:], strict=True)) == {
        "hits": "sum",
        "accuracy": "mean",
        "worst": "max",
        "best": "min",
        "all right": "min",
        "outputs": "concat",
        "tokens": "last",
        "norm": "last",
        "hits of the masked": "sum",
        "spread of inputs": "last",
        "total": "sum",
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("fun", "said"),
    [("masked mean", "mean"), ("sum over a number", "mean"), ("mean", "mean"), ("sum", "sum")],
)
def test_what_is_right_of_the_loss_may_be_said(fun, said):
    check(EQUAL[fun], PARAMS, BATCH, 4, reduce=said)


@pytest.mark.parametrize("normalize", [standardized, jax.jit(standardized)], ids=["as is", "jit"])
def test_a_function_of_the_slice_alone(normalize):
    def fun(p, b):
        normed = launcher.per_slice(normalize)(net(p, b))
        return (normed * b["t"]).mean()

    values, _, words = by_slices(fun, PARAMS, BATCH, 2)
    halves = [jax.tree.map(lambda x, s=s: x[s], BATCH) for s in (slice(4), slice(4, 8))]
    np.testing.assert_allclose(
        values[0], np.mean([fun(PARAMS, half) for half in halves]), rtol=1e-5
    )
    assert words == ("mean",)


def test_keys_made_in_the_loss_draw_as_on_one_device():
    def fun(p, b):
        noise = jax.random.normal(jax.random.key(3), (rows(b),))
        return losses(p, b).mean(), noise

    (_, noise), _, words = by_slices(fun, PARAMS, BATCH, 4, has_aux=True)
    assert words == ("mean", "concat")
    np.testing.assert_allclose(noise, jax.random.normal(jax.random.key(3), (8,)), rtol=1e-6)


def test_a_random_mask_and_its_sum_are_of_the_same_draw():
    def fun(p, b):
        mask = jax.random.bernoulli(jax.random.key(1), 0.5, (rows(b),))
        return (losses(p, b) * mask).sum() / mask.sum()

    check(fun, PARAMS, BATCH, 4)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", EQUAL)
def test_slices_of_one_row(name):
    """JAX leaves out what repeats a single row: the program is another one."""
    check(EQUAL[name], PARAMS, BATCH, ROWS)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["masked mean", "sum and decay", "row and label", "label of each"])
def test_a_batch_of_two_rows(name):
    """No slice has several rows: a batch of four tells how slices differ from the whole."""
    check(EQUAL[name], PARAMS, jax.tree.map(lambda x: x[2:4], BATCH), 2)


def test_the_row_of_a_sequence():
    """Of one row, JAX looks up the labels by another index."""

    def fun(p, b):
        logits = jnp.tanh(b["x"][:, :, None] * p["a"][:, :3])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, b["label"])
        return (each * b["mask"]).sum() / b["mask"].sum()

    labels = np.random.default_rng(0).integers(0, 3, (ROWS, 4))
    batch = {"x": BATCH["x"], "label": labels, "mask": (labels > 0).astype(np.float32)}
    check(fun, PARAMS, batch, ROWS)


@pytest.mark.parametrize(
    ("name", "times"), [("mean", 1), ("label of each", 1), ("masked mean", 2), ("row and label", 2)]
)
def test_a_step_is_traced_again_only_where_that_tells_something(name, times):
    calls = []

    def step(p, b):
        calls.append(rows(b))
        return launcher.value_and_grad(EQUAL[name])(p, b)

    trace_step(step, (PARAMS, BATCH))
    assert len(calls) == times


@pytest.mark.sampled(5)
@pytest.mark.parametrize("count", [2, ROWS])
@pytest.mark.parametrize(
    "numbers",
    [
        lambda rows: 2 * rows,
        lambda rows: rows[:, None] * jnp.ones((1, 3), int),
        lambda rows: jnp.stack([rows, jnp.zeros_like(rows)], 1),
    ],
)
def test_row_numbers_as_a_result_are_those_of_the_whole_batch(numbers, count):
    def fun(p, b):
        rows = jnp.arange(len(b["x"]))
        return (b["x"] @ p["a"])[rows, 0].mean(), numbers(rows)

    assert check(fun, PARAMS, BATCH, count, has_aux=True) == ("mean", "concat")


def test_row_numbers_that_are_indices_too_are_no_result():
    def fun(p, b):
        rows = jnp.arange(len(b["x"]))
        return (b["x"] @ p["a"])[rows, 0].mean(), rows

    with pytest.raises(BatchError, match="it numbers the rows: number them outside of the loss"):
        check(fun, PARAMS, BATCH, 2, has_aux=True)
