"""Losses as people write them: by slices they equal the whole batch, or are refused."""

import by_slices
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_slices import ROWS, check, losses, net, normal
from jax import lax

import launcher
from launcher.trace import BatchError

LENGTH, VOCAB = 7, 5
PARAMS = by_slices.PARAMS | {
    "table": normal(VOCAB, 6),
    "up": normal(6, 4) / 2,
    "log": np.float32(0.3),
}
BATCH = by_slices.BATCH | {
    "advantage": normal(ROWS),
    "tokens": np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH)),
    "sequence": normal(ROWS, LENGTH, 4),
    "graph": np.repeat(np.arange(4), 2),
    "seed": np.arange(ROWS),
}
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def rows(b):
    return len(b["x"])


def language_model(p, tokens):
    return jnp.tanh(p["table"][tokens]) @ p["up"] @ p["a"] @ p["table"].T


def shifted_with_smoothed_labels(p, b):
    inputs = jnp.pad(b["tokens"], ((0, 0), (1, 0)))[:, :-1]
    logits, weights = language_model(p, inputs), jnp.where(b["tokens"] > 0, 1.0, 0.0)
    soft = jnp.where(jax.nn.one_hot(b["tokens"], VOCAB) == 1, 0.9, 0.025)
    each = -jnp.sum(soft * jax.nn.log_softmax(logits), -1) * weights
    hits = (logits.argmax(-1) == b["tokens"]) * weights
    return each.sum() / weights.sum(), {
        "loss": each.sum(),
        "hits": hits.sum(),
        "tokens": weights.sum(),
    }


def masked_language_model(p, b):
    positions = b["tokens"][:, :3]
    logits = jnp.take_along_axis(language_model(p, b["tokens"]), positions[..., None], 1)
    weights = (positions > 0).astype(jnp.float32)
    return (cross_entropy(logits, positions) * weights).sum() / (weights.sum() + 1e-5)


def recurrent(p, b):
    def step(state, x):
        state = jnp.tanh(x @ p["a"] + state)
        return state, state @ p["b"]

    _, out = lax.scan(step, jnp.zeros((rows(b), 6)), b["sequence"].swapaxes(0, 1))
    mask = jnp.arange(LENGTH)[None] < b["tokens"][:, :1]
    return -(jax.nn.log_softmax(out.swapaxes(0, 1))[..., 0] * mask).sum() / mask.sum()


def clipped_policy(p, b):
    advantage = (b["advantage"] - b["advantage"].mean()) / (b["advantage"].std() + 1e-8)
    ratio = jnp.exp(-losses(p, b) - b["weight"])
    policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()
    chances = jax.nn.softmax(net(p, b))
    entropy = -(chances * jnp.log(chances)).sum(-1).mean()
    value = ((net(p, b)[:, 0] - b["t"][:, 0]) ** 2).mean()
    return policy + 0.5 * value - 0.01 * entropy, {
        "divergence": ((ratio - 1) - jnp.log(ratio)).mean(),
        "clipped": (jnp.abs(ratio - 1) > 0.2).mean(),
        "largest": ratio.max(),
    }


def preference(p, b):
    def of(tokens):
        chosen = jax.nn.log_softmax(language_model(p, b["tokens"]))
        return jnp.take_along_axis(chosen, tokens[..., None], -1)[..., 0].sum(-1)

    margin = of(b["tokens"]) - of(b["tokens"][:, ::-1])
    return -jax.nn.log_sigmoid(0.1 * margin).mean(), {"margin": margin.mean()}


def equation_residual(p, b):
    def field(x):
        return jnp.tanh(x @ p["a"]).sum()

    return (jnp.trace(jax.vmap(jax.hessian(field))(b["x"]), axis1=1, axis2=2) ** 2).mean()


def counted(p, b):
    guess = net(p, b).argmax(1)
    return losses(p, b).mean(), {
        "confusion": jnp.zeros((3, 3), jnp.int32).at[b["label"], guess].add(1),
        "histogram": jnp.histogram(net(p, b), bins=4, range=(-2, 2))[0],
        "rows": np.float32(rows(b)),
    }


def mixed(p, b):
    order = jax.random.permutation(jax.random.key(0), rows(b))
    return losses(p, {**b, "x": 0.7 * b["x"] + 0.3 * b["x"][order]}).mean()


def covariances(p, b):
    h = jnp.tanh(b["sequence"] @ p["a"])
    return jnp.swapaxes(h, 1, 2) @ h + jnp.eye(6)


EQUAL = {
    "eigenvalues of each example": lambda p, b: jnp.linalg.eigvalsh(covariances(p, b))[:, 0].mean(),
    "a factor of each example": lambda p, b: jnp.linalg.cholesky(covariances(p, b)).mean(),
    "singular values, vmap": lambda p, b: jax.vmap(
        lambda x: jnp.linalg.svd(x @ p["a"], compute_uv=False).max()
    )(b["sequence"]).mean(),
    "shifted, smoothed labels": shifted_with_smoothed_labels,
    "masked language model": masked_language_model,
    "recurrent": recurrent,
    "clipped policy": clipped_policy,
    "preference": preference,
    "equation residual": equation_residual,
    "counted": counted,
    "mixed": mixed,
    "focal": lambda p, b: (
        optax.sigmoid_focal_loss(net(p, b), jax.nn.one_hot(b["label"], 3), alpha=0.25).sum()
        / jnp.maximum(b["mask"].sum(), 1)
    ),
    "connectionist": lambda p, b: optax.ctc_loss(
        language_model(p, b["tokens"]),
        jnp.zeros((rows(b), LENGTH)),
        b["tokens"][:, :3],
        (b["tokens"][:, :3] == 0).astype(jnp.float32),
    ).mean(),
    "triplet": lambda p, b: optax.losses.triplet_margin_loss(net(p, b), b["t"], -b["t"]).mean(),
    "own view": lambda p, b: (
        2 - 2 * optax.cosine_similarity(net(p, b), lax.stop_gradient(b["t"]), epsilon=1e-6)
    ).mean(),
    "uncertainty": lambda p, b: jnp.exp(-p["log"]) * losses(p, b).mean() + p["log"],
    "gradient penalty": lambda p, b: (
        jnp.linalg.norm(jax.grad(lambda x: net(p, {"x": x}).sum())(b["x"]), axis=1) - 1
    ).mean(),
    "routed": lambda p, b: (
        (jax.nn.logsumexp(b["x"] @ p["a"], -1) ** 2).mean()
        + lax.top_k(b["x"] @ p["a"], 2)[0].mean()
    ),
    "mean of a graph": lambda p, b: (
        jax.ops.segment_sum(net(p, b), b["graph"], 4)
        / jax.ops.segment_sum(jnp.ones(rows(b)), b["graph"], 4)[:, None]
    ).mean(),
    "last token": lambda p, b: (b["sequence"] @ p["a"])[
        jnp.arange(rows(b)), b["tokens"][:, 0]
    ].mean(),
    "flat tokens": lambda p, b: (
        -jax.nn.log_softmax(language_model(p, b["tokens"]).reshape(-1, VOCAB))[
            jnp.arange(b["tokens"].size), b["tokens"].reshape(-1)
        ].mean()
    ),
    "a key of each example": lambda p, b: (
        net(p, b) * jax.vmap(lambda s: jax.random.normal(jax.random.key(s), (3,)))(b["seed"])
    ).mean(),
    "stacked": lambda p, b: jnp.stack([net(p, b), b["t"]], 1).prod(1).mean(),
    "squared number of rows": lambda p, b: 1e9 * (losses(p, b).sum() * (1e-9 / rows(b) ** 2)),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", EQUAL)
def test_equal(name):
    out = EQUAL[name](PARAMS, BATCH)
    check(EQUAL[name], PARAMS, BATCH, 4, has_aux=isinstance(out, tuple))


def first_two(values):
    return values[0] * values[1]


REFUSED = {
    # rows by turns, the first rows of each slice, of a longer array
    "halves by number": lambda p, b: first_two(
        net(p, b)[jnp.arange(rows(b)).reshape(2, -1)]
    ).mean(),
    "first half": lambda p, b: net(p, b)[jnp.arange(rows(b) // 2)].mean(),
    "first of all": lambda p, b: net(p, b).reshape(-1)[jnp.arange(rows(b))].sum(),
    # the total in each row
    "repeated total": lambda p, b: jnp.broadcast_to(losses(p, b).mean(), (rows(b),)).mean(),
    # numbers in the program that the batch size decides
    "power": lambda p, b: (losses(p, b) ** rows(b)).mean(),
    "power of a parameter": lambda p, b: losses(p, b).mean() + p["log"] ** rows(b),
    "column": lambda p, b: net(p, b).mean(0)[rows(b) // 4],
    # a number where the index is out of bounds
    "filled": lambda p, b: (
        net(p, b).sum(0).at[jnp.array([1, 7])].get(mode="fill", fill_value=1.0).sum()
    ),
    # examples that see one another
    "balance of experts": lambda p, b: (
        losses(p, b).mean() + (net(p, b).mean(0) * jax.nn.softmax(net(p, b)).mean(0)).sum()
    ),
    "standardized values": lambda p, b: (
        losses(p, b) / lax.stop_gradient(b["advantage"] - net(p, b)[:, 0]).std()
    ).mean(),
}
METRICS = {
    "any bit": lambda p, b: lax.reduce_or(net(p, b).argmax(1).astype(jnp.int32), (0,)),
    "over the mean": lambda p, b: (losses(p, b) / losses(p, b).mean()).max(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises(BatchError, match="joins examples"):
        by_slices.by_slices(REFUSED[name], PARAMS, BATCH, 2)


@pytest.mark.parametrize("name", METRICS)
def test_metrics_refused(name):
    with pytest.raises(BatchError, match=r"result 1 of the loss .* joins examples"):
        by_slices.by_slices(
            lambda p, b: (losses(p, b).mean(), METRICS[name](p, b)),
            PARAMS,
            BATCH,
            2,
            has_aux=True,
        )


@pytest.mark.parametrize(
    "fun",
    [
        lambda p, b: losses(p, b).mean() if rows(b) > 1 else 3 * losses(p, b).sum(),
        lambda p, b: (jnp.squeeze(net(p, b)[:, None]).sum(0) * jnp.arange(3.0)).mean(),
    ],
    ids=["branch", "squeezed"],
)
def test_another_program_on_one_row_is_refused(fun):
    check(fun, PARAMS, BATCH, 4)
    with pytest.raises(BatchError, match="another program on a slice"):
        by_slices.by_slices(fun, PARAMS, BATCH, ROWS)


def test_rows_one_by_one_are_another_program():
    with pytest.raises(BatchError, match="another program on a slice"):
        by_slices.by_slices(
            lambda p, b: sum(jnp.sum(row) for row in jnp.unstack(net(p, b))), PARAMS, BATCH, 2
        )


def test_sums_of_slices_are_summed_where_the_user_says_so():
    def fun(p, b):
        return losses(p, b).mean(), launcher.per_slice(lambda y: y.std() * 0 + y.sum())(net(p, b))

    assert check(fun, PARAMS, BATCH, 4, reduce=("mean", "sum"), has_aux=True) == ("mean", "sum")
