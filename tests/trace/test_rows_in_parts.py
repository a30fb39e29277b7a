"""Real and fake examples in one array: by slices as on the whole batch, or refused."""

import by_slices
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_slices import BATCH, PARAMS, ROWS, check, net, normal
from jax import lax

import launcher
from launcher.trace import BatchError, JoinedError

P = PARAMS | {"bias": normal(3)}
B = BATCH | {"pairs": normal(ROWS, 2, 4)}


def made(p, b):
    """Examples that depend on the parameters."""
    return jnp.tanh(b["t"] @ p["b"].T) @ p["a"].T


def told(p, b):
    """A row of each real and of each fake example."""
    return net(p, {"x": jnp.concatenate([b["x"], made(p, b)])}) + p["bias"]


def halves(p, b):
    return jnp.split(told(p, b), 2)


def column(b):
    return jnp.concatenate([jnp.ones(len(b["x"])), jnp.zeros(len(b["x"]))])[:, None]


def twice(b):
    return b["pairs"].reshape(-1, 4)


def quarters(p, b):
    """The second part is as long as the others together."""
    return net(p, {"x": jnp.concatenate([made(p, b), twice(b), b["x"]])})


def dropped(p, b):
    h = told(p, b)
    return jnp.where(jax.random.bernoulli(jax.random.key(3), 1.0, h.shape), h, 9.0)


def normed(x):
    return (x - x.mean(0)) * lax.rsqrt(x.var(0) + 0.1)


EQUAL = {
    "mean": lambda p, b: (told(p, b) ** 2).mean(),
    "sum": lambda p, b: (told(p, b) ** 2).sum() + halves(p, b)[0].sum(),
    "split": lambda p, b: (jax.nn.softplus(-halves(p, b)[0]) + halves(p, b)[1] * b["t"]).mean(),
    "sliced": lambda p, b: (told(p, b)[: len(b["x"]), 0] - told(p, b)[len(b["x"]) :, 1]).mean(),
    "labels": lambda p, b: optax.sigmoid_binary_cross_entropy(told(p, b), 0.9 * column(b)).mean(),
    "labels of classes": lambda p, b: optax.softmax_cross_entropy_with_integer_labels(
        told(p, b), jnp.concatenate([b["label"], b["label"][::-1]])
    ).mean(),
    "masked mean": lambda p, b: (told(p, b) * column(b)).sum() / column(b).sum(),
    "two views": lambda p, b: jnp.multiply(
        *jnp.split(net(p, {"x": jnp.concatenate([b["x"], 2 * b["x"]])}), 2)
    ).mean(),
    "a draw": lambda p, b: dropped(p, b).mean(),
    "flattened": lambda p, b: jnp.split(told(p, b).reshape(-1), 2)[1].mean(),
    "unlike parts": lambda p, b: (
        quarters(p, b)[: 3 * len(b["x"])][len(b["x"]) :] * twice(b)[:, :3]
    ).sum(),
    "scan": lambda p, b: lax.scan(lambda c, y: (c + y @ column(b)[:, 0], y), 0.0, told(p, b).T)[
        0
    ].sum(),
    "branch": lambda p, b: lax.cond(b["mask"].sum() > 2, jnp.sin, jnp.tanh, told(p, b)).mean(),
    "blocks made of the batch": lambda p, b: (
        net(p, {"x": jnp.concatenate([b["x"], -b["x"]])}) * twice(b)[:, :3]
    ).mean(),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("count", [2, ROWS])
@pytest.mark.parametrize("name", EQUAL)
def test_equal(name, count):
    check(EQUAL[name], P, B, count)


REFUSED = {
    "slice": lambda p, b: told(p, b)[1:].mean(),
    "slice, half a part": lambda p, b: told(p, b)[: len(b["x"]) // 2].mean(),
    "slice, as many as in a slice": lambda p, b: told(p, b)[:4].mean(),
    "split": lambda p, b: jnp.split(quarters(p, b), 2)[0].mean(),
    "rev": lambda p, b: (told(p, b)[::-1] * column(b)).mean(),
    "reshape": lambda p, b: told(p, b).reshape(-1, 2, 3).prod(1).mean(),
    "dot_general": lambda p, b: jax.nn.softmax(told(p, b) @ told(p, b).T).mean(),
    "mul, blocks": lambda p, b: (told(p, b) * twice(b)[:, :3]).mean(),
    "mul, rows": lambda p, b: (told(p, b) * jnp.arange(2 * len(b["x"]))[:, None]).mean(),
    "mul, other parts": lambda p, b: (
        quarters(p, b) * jnp.concatenate([quarters(p, b)[len(b["x"]) :], made(p, b)[:, :3]])
    ).mean(),
    "mul, a branch": lambda p, b: (  # equal rows, or blocks
        told(p, b) * lax.cond(b["mask"].sum() > 2, lambda y: y, jnp.zeros_like, twice(b)[:, :3])
    ).mean(),
    "mul, a loop": lambda p, b: (  # whose state is equal rows at first
        told(p, b)
        * lax.scan(
            lambda y, w: (y + w * twice(b)[:, :3], None),
            jnp.zeros((2 * len(b["x"]), 3)),
            p["bias"],
        )[0]
    ).mean(),
    "mul, in a slice": lambda p, b: launcher.per_slice(jnp.multiply)(
        told(p, b), twice(b)[:, :3]
    ).mean(),
    "dot_general, in a slice": lambda p, b: launcher.per_slice(jnp.matmul)(
        told(p, b), told(p, b).T
    ).mean(),
    "mul, equal rows": lambda p, b: (  # the parts end within one of them
        jnp.concatenate([made(p, b)[:, 0], twice(b)[:, 0]])
        * jnp.broadcast_to(p["bias"], b["t"].shape).reshape(-1)
    ).mean(),
}


@pytest.mark.sampled(5, rest="slow")
@pytest.mark.parametrize("count", [2, ROWS])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, count):
    words = rf"{name.split(',')[0]} at \S*test_rows_in_parts.py:.* joins examples"
    with pytest.raises(JoinedError, match=words):
        check(REFUSED[name], P, B, count)


def test_a_result_in_parts_says_what_to_return():
    with pytest.raises(BatchError, match="return each of the arrays that it joins as a result of"):
        check(lambda p, b: (told(p, b).mean(), told(p, b)), P, B, 2, has_aux=True)


def test_a_slice_norms_its_own_rows_of_each_part():
    def loss(p, b):
        real, fake = jnp.split(launcher.per_slice(normed)(told(p, b)), 2)
        return (real * b["t"] - fake * column(b)[: len(b["x"])]).mean()

    (value,), _, _ = by_slices.by_slices(loss, P, B, 2)
    own = [jax.tree.map(lambda x, s=s: jnp.split(x, 2)[s], B) for s in range(2)]
    np.testing.assert_allclose(value, np.mean([loss(P, b) for b in own]), rtol=1e-5)


def scores(p, x):
    """The discriminator: two convolutions and a dense layer."""
    for layer in ("first", "second"):
        x = lax.conv_general_dilated(
            x, p[layer], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.leaky_relu(x, 0.2)
        launcher.mark_pipeline_boundary()
    return x.reshape(len(x), -1) @ p["dense"]


def discriminator_step(state, b):
    """A step on smoothed labels; the images of a fixed generator are no part of the batch."""

    def loss(p):
        fake = jnp.tanh(b["noise"] @ state["generator"]).reshape(b["real"].shape)
        labels = jnp.concatenate([jnp.full(len(fake), 0.9), jnp.zeros(len(fake))])
        logits = scores(p, jnp.concatenate([b["real"], fake]))[:, 0]
        hits = [half.mean() for half in jnp.split((logits > 0) == (labels > 0), 2)]
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean(), hits

    found, grads = launcher.value_and_grad(loss, has_aux=True)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {**state, "params": params}, (found, grads)


METHODS = {
    "data": (launcher.DataParallel(), 2),
    "two microbatches": (launcher.DataParallel(num_micro_batches=2), 1),
    "stages": (
        launcher.PipeshardParallel(
            num_micro_batches=4, stage_option=launcher.UniformStageOption(num_stages=2)
        ),
        2,
    ),
    "zero3": (launcher.Zero3Parallel(), 2),
}


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", METHODS)
def test_a_discriminator(name):
    params = {"first": normal(3, 3, 1, 4), "second": normal(3, 3, 4, 4), "dense": normal(16, 1)}
    state = {"params": params, "generator": normal(5, 64)}
    batch = {"real": np.tanh(normal(16, 8, 8, 1)), "noise": normal(16, 5)}
    method, count = METHODS[name]
    step = launcher.parallelize(
        discriminator_step, method=method, devices=jax.devices()[:count], donate_argnums=()
    )
    got, want = jax.device_get((step(state, batch), jax.jit(discriminator_step)(state, batch)))
    assert step.last_plan.num_micro_batches * step.last_plan.num_replicas > 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got, want)
