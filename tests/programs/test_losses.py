"""Losses: sums, means, masks, weights, denominators; and those whose examples see one another."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from programs.pieces import (
    CLASSES,
    decay,
    losses,
    net,
    of_loss,
    rows,
)
from programs.program import ROWS, one_microbatch_only, several_slices, table_test

import launcher
from launcher.trace.errors import ReduceError

BATCH_SIZE = ROWS  # as a config says it


def squares(p, b):
    return ((net(p, b) - b["t"]) ** 2).mean(1)


def masked(each, mask):
    return (each * mask).sum() / mask.sum()


def two_tasks(p, b):
    y = net(p, b)
    of_label = optax.softmax_cross_entropy_with_integer_labels(y, b["label"])
    of_target = ((y - b["t"]) ** 2).mean(1)
    return masked(of_label, b["mask"]) + 0.5 * jnp.average(of_target, weights=b["weight"])


def learned_weights(p, b):
    """Uncertainty weighting (Kendall et al., arXiv 1705.07115)."""
    terms = jnp.stack([losses(p, b).mean(), squares(p, b).mean()])
    return jnp.sum(jnp.exp(-p["log"]) * terms + p["log"])


def balanced(p, b):
    counts = jnp.bincount(b["label"], length=CLASSES)
    return (losses(p, b) / counts[b["label"]]).sum() / CLASSES


def focal(p, b):
    targets = jax.nn.one_hot(b["label"], CLASSES)
    each = optax.sigmoid_focal_loss(net(p, b), targets, alpha=0.25)
    return each.sum() / jnp.maximum((b["mask"] > 0).sum(), 1)


def distilled(p, b):
    teacher = jax.nn.softmax(lax.stop_gradient(net({**p, "a": 2 * p["a"]}, b)) / 2)
    return optax.kl_divergence(jax.nn.log_softmax(net(p, b)), teacher).mean()


def standardized(p, b):
    return losses(p, {**b, "x": (b["x"] - b["x"].mean(0)) / b["x"].std(0)}).mean()


def mixup(p, b):
    mixed = losses(p, {**b, "x": 0.7 * b["x"] + 0.3 * b["x"][::-1]})
    return mixed.mean()


def loop_of_the_batch(p, b):
    """Targets are smoothed as often as the batch says."""
    times = b["label"].max() + b["mask"].sum().astype(jnp.int32)
    target = lax.fori_loop(0, times, lambda _, t: 0.9 * t, b["t"])
    return ((net(p, b) - target) ** 2).mean()


def slope_penalty(p, b):
    slope = jax.grad(lambda x: net(p, {"x": x}).sum())(b["x"])
    return losses(p, b).mean() + 0.1 * ((jnp.linalg.norm(slope, axis=1) - 1) ** 2).mean()


def contrastive(p, b):
    y, t = net(p, b), b["t"]
    return optax.softmax_cross_entropy_with_integer_labels(y @ t.T, jnp.arange(rows(b))).mean()


def batch_norm(p, b):
    h = net(p, b)
    return ((h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-3) * b["t"]).mean()


def manifold_mixup(p, b):
    h = jnp.tanh(b["x"] @ p["a"])
    launcher.mark_pipeline_boundary()
    y = (0.7 * h + 0.3 * h[::-1]) @ p["b"]
    return optax.softmax_cross_entropy_with_integer_labels(y, b["label"]).mean()


def halves(p, b):
    first, second = jnp.split(net(p, b), 2)
    return ((first - second) ** 2).mean()


def capacity(p, b):
    """Experts take the first tokens that come, up to a number of them."""
    gates = jax.nn.softmax(net(p, b))
    chosen = jax.nn.one_hot(gates.argmax(1), CLASSES)
    place = jnp.cumsum(chosen, axis=0) * chosen
    kept = chosen * (place <= rows(b) // CLASSES)
    return ((gates * kept).sum(1) * b["t"][:, 0]).mean()


def ranking(p, b):
    scores = net(p, b)[:, 0]
    above = b["weight"][:, None] > b["weight"]
    return (jax.nn.softplus(scores[None] - scores[:, None]) * above).mean()


def loop_of_the_outputs(p, b):
    """A target that is made smaller until the outputs are larger."""
    y = net(p, b)
    largest = lax.stop_gradient(jnp.abs(y).max())
    bound = lax.while_loop(lambda t: t > largest, lambda t: t / 2, jnp.abs(b["t"]).max())
    return ((y - bound) ** 2).mean()


def class_means(p, b):
    sums = jax.ops.segment_sum(net(p, b), b["label"], CLASSES)
    counts = jax.ops.segment_sum(jnp.ones(rows(b)), b["label"], CLASSES)
    return ((sums / (counts[:, None] + 1) - jnp.eye(CLASSES)) ** 2).sum()


def dice(y, t):
    """Twice what two masks share, over what both hold."""
    return 1 - (2 * (y * t).sum() + 1) / (y.sum() + t.sum() + 1)


EQUAL = {
    "mean": lambda p, b: losses(p, b).mean(),
    "sum": lambda p, b: losses(p, b).sum(),
    "sum over a config's batch size": lambda p, b: losses(p, b).sum() / BATCH_SIZE,
    "sum over the rows": lambda p, b: losses(p, b).sum() / rows(b),
    "mean and weight decay": lambda p, b: losses(p, b).mean() + decay(p),
    "sum and weight decay": lambda p, b: losses(p, b).sum() + decay(p),
    "mean and sum": lambda p, b: losses(p, b).mean() + 0.1 * squares(p, b).sum(),
    "masked mean": lambda p, b: masked(losses(p, b), b["mask"]),
    "guarded masked mean": lambda p, b: (
        (losses(p, b) * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1)
    ),
    "masked mean and weight decay": lambda p, b: masked(losses(p, b), b["mask"]) + decay(p),
    "weighted mean": lambda p, b: jnp.average(losses(p, b), weights=b["weight"]),
    "mean where": lambda p, b: jnp.mean(losses(p, b), where=b["mask"] > 0),
    "two tasks": two_tasks,
    "learned weights": learned_weights,
    "balanced classes": balanced,
    "focal": focal,
    "distilled": distilled,
    "Huber": lambda p, b: optax.huber_loss(net(p, b), b["t"]).mean(),
    "standardized inputs": standardized,
    "mixup": mixup,
    "weights by segments": lambda p, b: (
        jax.ops.segment_sum(losses(p, b), b["label"], CLASSES) @ jnp.arange(1.0, CLASSES + 1)
    ),
    "loop of the batch": loop_of_the_batch,
    "slope penalty": slope_penalty,
    "sorted weights": lambda p, b: (losses(p, b) * jnp.sort(b["weight"])[::-1]).mean(),
    "dice of each": lambda p, b: jax.vmap(dice)(
        jax.nn.sigmoid(net(p, b)), jax.nn.one_hot(b["label"], CLASSES)
    ).mean(),
}
# What a refusal tells of the equation that joins examples, in several microbatches.
JOINED = {
    "contrastive": (contrastive, "dot_general"),
    "batch norm": (batch_norm, "sub"),
    "standard deviation": (lambda p, b: net(p, b).std(), "sub"),
    "root of a mean": (lambda p, b: jnp.sqrt(squares(p, b).mean()), "sqrt"),
    "sorted": (lambda p, b: (jnp.sort(losses(p, b)) * b["weight"]).mean(), "sort"),
    "softmax over the batch": (lambda p, b: (jax.nn.softmax(net(p, b), 0) * b["t"]).sum(), "sub"),
    "manifold mixup": (manifold_mixup, "rev"),
    "halves": (halves, "split|slice"),
    "capacity of experts": (capacity, "cumsum"),
    "ranking": (ranking, "sub"),
    "loop of the outputs": (loop_of_the_outputs, "while"),
    "means of classes": (class_means, "integer_pow|square|sub"),
    "perplexity": (lambda p, b: jnp.exp(losses(p, b).mean()), "exp"),
    "dice of the batch": (
        lambda p, b: dice(jax.nn.sigmoid(net(p, b)), jax.nn.one_hot(b["label"], CLASSES)),
        "div",
    ),
}
# Losses with a wrong `reduce`.
MISNAMED = {
    "sum, said to be a mean": (EQUAL["sum"], "mean", r'is a sum .* say "sum"'),
    "mean, said to be a sum": (EQUAL["mean"], "sum", r'is a mean .* say "mean"'),
}
PROGRAMS = {
    **{name: of_loss(fun) for name, fun in EQUAL.items()},
    **{
        name: of_loss(fun, refused=one_microbatch_only(rf"\b({match}) at .* joins examples"))
        for name, (fun, match) in JOINED.items()
    },
    **{
        name: of_loss(fun, reduce=said, refused=several_slices(match, ReduceError))
        for name, (fun, said, match) in MISNAMED.items()
    },
    "sum, said so": of_loss(EQUAL["sum and weight decay"], reduce="sum"),
    "masked mean, said to be a mean": of_loss(EQUAL["masked mean"], reduce="mean"),
    "worst example": of_loss(
        lambda p, b: losses(p, b).max(), refused=one_microbatch_only("takes the max")
    ),
}
test_equal_to_one_device_or_refused = table_test(PROGRAMS)
