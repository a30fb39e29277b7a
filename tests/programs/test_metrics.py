"""Metrics beside the loss: sums, means, extremes, rows, counts; and what slices cannot tell."""

import jax
import jax.numpy as jnp
import optax
from programs.pieces import CLASSES, net, of_loss, rows
from programs.program import one_microbatch_only, several_slices, table_test

from launcher.trace.errors import ReduceError


def with_metrics(metrics):
    """A mean loss beside `metrics(losses, outputs, params, batch)`."""

    def loss(p, b):
        y = net(p, b)
        each = optax.softmax_cross_entropy_with_integer_labels(y, b["label"])
        return each.mean(), metrics(each, y, p, b)

    return loss


def hits(y, b):
    return y.argmax(1) == b["label"]


def precision(y, b):
    guessed = y.argmax(1) == 0
    return (guessed & (b["label"] == 0)).sum() / jnp.maximum(guessed.sum(), 1)


def top_two(y, b):
    return (jax.lax.top_k(y, 2)[1] == b["label"][:, None]).any(1)


def confusion(y, b):
    return jnp.zeros((CLASSES, CLASSES), jnp.int32).at[b["label"], y.argmax(1)].add(1)


EQUAL = {
    "float counts": lambda each, y, p, b: {
        "hits": hits(y, b).astype(jnp.float32).sum(),
        "accuracy": hits(y, b).mean(),
        "total": each.sum(),
        "tokens": b["mask"].sum(),
    },
    "whole counts": lambda each, y, p, b: {
        "hits": hits(y, b).sum(),
        "largest label": b["label"].max(),
        "rows": rows(b),
        "confusion": confusion(y, b),
        "histogram": jnp.histogram(y, bins=4, range=(-2, 2))[0],
    },
    "extremes": lambda each, y, p, b: {
        "worst": each.max(),
        "best": each.min(),
        "largest of a class": y.max(0),
        "all right": hits(y, b).all(),
        "any right": hits(y, b).any(),
    },
    "rows": lambda each, y, p, b: {
        "losses": each,
        "guesses": y.argmax(1),
        "probabilities": jax.nn.softmax(y),
        "right": hits(y, b),
    },
    "masked": lambda each, y, p, b: {
        "accuracy": (hits(y, b) * b["mask"]).sum() / b["mask"].sum(),
        "loss": jnp.average(each, weights=b["weight"]),
        "of a class": jnp.mean(each, where=b["label"] == 1),
    },
    "by classes": lambda each, y, p, b: {
        "sums": jax.ops.segment_sum(each, b["label"], CLASSES),
        "means": jax.ops.segment_sum(each, b["label"], CLASSES)
        / jnp.maximum(jnp.bincount(b["label"], length=CLASSES), 1),
        "two best": top_two(y, b).mean(),
    },
    "without examples": lambda each, y, p, b: {
        "norm": optax.tree.norm(p),
        "spread of inputs": b["x"].std(),
        "number": jnp.float32(3),
        "nothing": None,
    },
    "a tuple of numbers": lambda each, y, p, b: (each.mean(), each.sum(), (y.sum(), y.mean(0))),
    "mean squares": lambda each, y, p, b: {
        "second moment": (y**2).mean(0),
        "bits": each.mean() / 2,
    },
    "functions of sums": lambda each, y, p, b: {
        "perplexity": jnp.exp(each.mean()),
        "precision": precision(y, b),
        "root": jnp.sqrt(((y - b["t"]) ** 2).mean()),
    },
    "functions of extremes": lambda each, y, p, b: {
        "range": each.max() - each.min(),
        "worst, turned": -2.0 * each.max(),
    },
}
JOINED = {
    "deviation": (lambda each, y, p, b: y.std(), "sub"),
    "median": (lambda each, y, p, b: jnp.median(each), "broadcast_in_dim|sort"),
    "place of the worst": (lambda each, y, p, b: each.argmax(), "argmax"),
}
PROGRAMS = {
    **{name: of_loss(with_metrics(fun), has_aux=True) for name, fun in EQUAL.items()},
    **{
        name: of_loss(
            with_metrics(fun),
            has_aux=True,
            refused=one_microbatch_only(rf"result 1 of the loss .* ({match}) at .* joins examples"),
        )
        for name, (fun, match) in JOINED.items()
    },
    "examples last": of_loss(
        with_metrics(lambda each, y, p, b: y.T),
        has_aux=True,
        refused=several_slices("transpose it, so that the examples come first"),
    ),
    "said to be what it is": of_loss(
        with_metrics(lambda each, y, p, b: {"hits": hits(y, b).sum(), "worst": each.max()}),
        has_aux=True,
        reduce=("mean", {"hits": "sum", "worst": "max"}),
    ),
    "said to be a mean": of_loss(
        with_metrics(lambda each, y, p, b: {"hits": hits(y, b).astype(jnp.float32).sum()}),
        has_aux=True,
        reduce="mean",
        refused=several_slices(r'result 1 of the loss is a sum .* say "sum"', ReduceError),
    ),
}
test_equal_to_one_device_or_refused = table_test(PROGRAMS)
