"""Results that are functions of sums: computed from the whole batch's sums, after the loss."""

import jax
import jax.numpy as jnp
import pytest
from by_slices import BATCH, PARAMS, compare, losses, net, run

import launcher
from launcher.trace import trace_step
from launcher.trace.errors import JoinedError


def with_metrics(metrics):
    def loss(params, batch):
        each = losses(params, batch)
        return each.mean(), metrics(params, batch, each)

    return loss


def masked_mean(values, batch):
    return (values * batch["mask"]).sum() / batch["mask"].sum()


def f1(params, batch, losses):
    predicted = jax.nn.one_hot(net(params, batch).argmax(-1), 3)
    wanted = jax.nn.one_hot(batch["label"], 3)
    hits, given, asked = ((predicted * wanted).sum(0), predicted.sum(0), wanted.sum(0))
    return {
        "each": 2 * hits / (given + asked + 1),
        "macro": (2 * hits / (given + asked + 1)).mean(),
    }


def correlation(params, batch, losses):
    a, b = net(params, batch)[:, 0], batch["t"][:, 0]
    n = len(a)
    ab, aa, bb = (a * b).sum() / n, (a * a).sum() / n, (b * b).sum() / n
    return (ab - a.mean() * b.mean()) / jnp.sqrt((aa - a.mean() ** 2) * (bb - b.mean() ** 2))


METRICS = {
    "perplexity": lambda p, b, losses: jnp.exp(losses.mean()),
    "masked perplexity": lambda p, b, losses: jnp.exp(masked_mean(losses, b)),
    "capped perplexity": lambda p, b, losses: jnp.minimum(jnp.exp(losses.mean()), 1e4),
    "bits": lambda p, b, losses: {"bits": losses.mean() / jnp.log(2.0), "loss": losses.mean()},
    "root of the mean square": lambda p, b, losses: jnp.sqrt(jnp.mean((net(p, b) - b["t"]) ** 2)),
    "decibels": lambda p, b, losses: -10 * jnp.log10(jnp.mean((net(p, b) - b["t"]) ** 2)),
    "F1": f1,
    "correlation": correlation,
    "spread": lambda p, b, losses: losses.max() - losses.min(),
    "negated largest": lambda p, b, losses: -losses.max(),
    "all of them": lambda p, b, losses: (losses > 0.1).all().astype(jnp.float32),
    "with parameters": lambda p, b, losses: jnp.exp(losses.mean()) + (p["a"] ** 2).sum(),
    "most frequent": lambda p, b, losses: net(p, b).sum(0).argmax(),
    "entropy": lambda p, b, losses: jax.scipy.special.entr(jax.nn.softmax(net(p, b)).mean(0)).sum(),
    "twice the same": lambda p, b, losses: [jnp.exp(losses.mean())] * 2,
    "ratio to the loss": lambda p, b, losses: jnp.where(
        losses.sum() > 3, losses.max() / losses.mean(), 0.0
    ),
    "a confusion matrix, normalized": lambda p, b, losses: (lambda m: m / m.sum())(
        jnp.zeros((3, 3)).at[b["label"], net(p, b).argmax(-1)].add(1.0)
    ),
    "rows beside": lambda p, b, losses: {"ppl": jnp.exp(losses.mean()), "rows": losses},
}


def evaluation(fun):
    return lambda params, batch: launcher.microbatched(fun)(params, batch)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", METRICS)
def test_a_function_of_sums_is_that_of_the_whole_batch(name, count):
    compare(evaluation(with_metrics(METRICS[name])), (PARAMS, BATCH), count)


def test_beside_a_gradient():
    def step(params, batch):
        (value, aux), _ = launcher.value_and_grad(
            with_metrics(METRICS["perplexity"]), has_aux=True
        )(params, batch)
        return value, aux

    traced = trace_step(step, (PARAMS, BATCH))
    assert traced.loss(4).reduce == ("mean", "mean")
    assert [e.primitive.name for e in traced.after] == ["exp"]


@pytest.mark.parametrize(
    "metric",
    [
        lambda p, b, losses: losses.std(),
        lambda p, b, losses: jnp.median(losses),
        lambda p, b, losses: jnp.exp(losses.mean()) * losses,
        lambda p, b, losses: jax.nn.logsumexp(losses),
    ],
)
def test_what_needs_the_rows_again_is_refused(metric):
    with pytest.raises(JoinedError, match="result 1 of the loss"):
        run(evaluation(with_metrics(metric)), (PARAMS, BATCH), 2)


def test_plain_metrics_are_not_traced_again():
    traces = []

    def step(params, batch):
        traces.append(batch["x"].shape)
        return launcher.value_and_grad(
            with_metrics(lambda p, b, losses: {"hits": losses.sum(), "mean": losses.mean() * 3}),
            has_aux=True,
        )(params, batch)

    trace_step(step, (PARAMS, BATCH))
    assert len(traces) == 1
