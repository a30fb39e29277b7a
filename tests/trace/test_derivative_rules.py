"""Derivative rules that a loss writes itself: equal to one device, or refused with their line."""

import jax
import jax.numpy as jnp
import pytest
from by_slices import BATCH, PARAMS, ROWS, check, net

import launcher
from launcher.trace import trace_step
from launcher.trace.errors import JoinedError


def with_backward(fun, backward):
    """`fun` of one argument, whose gradient is `backward(argument, gradient of the result)`."""
    function = jax.custom_vjp(fun)
    function.defvjp(lambda x: (fun(x), x), lambda x, g: (backward(x, g),))
    return function


def with_tangent(fun, tangent):
    function = jax.custom_jvp(fun)
    function.defjvp(lambda primals, rates: (fun(*primals), tangent(*primals, *rates)))
    return function


def same(x):
    return x


clipped = with_backward(same, lambda x, g: jnp.clip(g, -0.01, 0.01))
reversed_gradient = with_backward(same, lambda x, g: -0.3 * g)
straight_through = with_backward(lambda x: jnp.round(x), lambda x, g: g)
row_normalized = with_backward(
    same, lambda x, g: g / (1e-3 + jnp.linalg.norm(g, axis=-1, keepdims=True))
)
normalized = with_backward(same, lambda x, g: g / jnp.linalg.norm(g))
centred = with_backward(same, lambda x, g: g - g.mean(0))
scaled_by_rows = with_backward(same, lambda x, g: g * x.shape[0])
by_batch_mean = with_backward(same, lambda x, g: g * x.mean())
doubled = with_tangent(lambda x: 2 * x, lambda x, t: 2 * t)
joined_tangent = with_tangent(lambda x: 2 * x, lambda x, t: t * jnp.mean(x))
recursive = with_tangent(jnp.sin, lambda x, t: t * recursive(x + jnp.pi / 2))


@jax.custom_vjp
def fused_loss(logits, labels):
    """A cross-entropy with its mean, as kernels for large vocabularies have it."""
    rows = jnp.arange(len(labels))
    return -jnp.mean(jax.nn.log_softmax(logits)[rows, labels])


def _fused_backward(saved, g):
    logits, labels = saved
    wrong = jax.nn.softmax(logits) - jax.nn.one_hot(labels, 3)
    return g * wrong / len(labels), None


fused_loss.defvjp(lambda x, y: (fused_loss(x, y), (x, y)), _fused_backward)


@jax.custom_vjp
def dense(x, kernel):
    return x @ kernel


dense.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


@jax.custom_vjp
def averaging_dense(x, kernel):
    return x @ kernel


averaging_dense.defvjp(lambda x, w: (x @ w, (x, w)), lambda s, g: (g @ s[1].T, s[0].T @ g / len(g)))


@jax.custom_vjp
def dense_and_mean(x, kernel):
    return x @ kernel, jnp.mean(x**2)


def _averaged(saved, g):
    x, kernel = saved
    return g[0] @ kernel.T + 2 * x * g[1], x.T @ g[0] / len(x)


dense_and_mean.defvjp(lambda x, w: (dense_and_mean(x, w), (x, w)), _averaged)


def mean_with_rule(backward):
    """A mean square with this gradient of the rows."""
    function = with_backward(lambda r: jnp.mean(r**2), backward)
    return lambda p, b: function(net(p, b) - b["t"])


@jax.custom_vjp
def fused_dense(x, kernel, y):
    """A mean square behind a product, as kernels that never hold the product have it."""
    return jnp.mean((x @ kernel - y) ** 2)


def _fused_dense_backward(saved, g):
    x, kernel, y = saved
    wrong = 2 * (x @ kernel - y) * g / y.size
    return wrong @ kernel.T, x.T @ wrong, None


fused_dense.defvjp(lambda *args: (fused_dense(*args), args), _fused_dense_backward)


def with_mean(p, b):
    y, mean = dense_and_mean(jnp.tanh(b["x"] @ p["a"]), p["b"])
    return jnp.mean((y - b["t"]) ** 2) + mean


def mean_through(fun):
    return lambda p, b: jnp.mean((fun(net(p, b)) - b["t"]) ** 2)


def sum_through(fun):
    return lambda p, b: jnp.sum((fun(net(p, b)) - b["t"]) ** 2)


def of_weights(fun):
    return lambda p, b: mean_through(same)({**p, "b": fun(p["b"])}, b)


def in_loop(fun):
    def loss(p, b):
        h, _ = jax.lax.scan(lambda h, _: (fun(jnp.tanh(h)), None), net(p, b), None, length=2)
        return jnp.mean((h - b["t"]) ** 2)

    return loss


EQUAL = {
    "a clip of the gradient, mean": mean_through(clipped),
    "a clip of the gradient, sum": sum_through(clipped),
    "a reversed gradient": mean_through(reversed_gradient),
    "a straight-through estimate": mean_through(straight_through),
    "a gradient normalized for each row": mean_through(row_normalized),
    "a straight-through estimate of weights": of_weights(straight_through),
    "a product with its own rule": lambda p, b: jnp.mean(
        (dense(jnp.tanh(b["x"] @ p["a"]), p["b"]) - b["t"]) ** 2
    ),
    "a loss with its mean in it": lambda p, b: fused_loss(net(p, b), b["label"]),
    "a mean's own gradient": mean_with_rule(lambda r, g: g * 2 * r / r.size),
    "a mean's gradient, halved": mean_with_rule(lambda r, g: (0.5 * g) * r * (1 / r.size)),
    "a mean behind a product": lambda p, b: fused_dense(jnp.tanh(b["x"] @ p["a"]), p["b"], b["t"]),
    "a tangent": mean_through(doubled),
    "a rule that calls its function": mean_through(recursive),
    "a rule in a loop": in_loop(clipped),
    "a rule under jit and checkpoint": mean_through(jax.checkpoint(jax.jit(clipped))),
    "a rule under vmap": mean_through(jax.vmap(normalized)),
}

REFUSED = {
    "a gradient normalized over the batch": mean_through(normalized),
    "a centred gradient": mean_through(centred),
    "a gradient times the rows": mean_through(scaled_by_rows),
    "a gradient times a mean": mean_through(by_batch_mean),
    "a tangent times a mean": mean_through(joined_tangent),
    "a clip of the weights' gradient": of_weights(clipped),
    "a product whose gradient is a mean": lambda p, b: jnp.mean(
        (averaging_dense(jnp.tanh(b["x"] @ p["a"]), p["b"]) - b["t"]) ** 2
    ),
    "a centred gradient in a loop": in_loop(centred),
    "rows beside a mean": with_mean,
    "a mean with the gradient of a sum": mean_with_rule(lambda r, g: g * 2 * r),
    "a mean divided twice": mean_with_rule(lambda r, g: g * r / len(r) / len(r)),
    "a mean divided by a root": mean_with_rule(lambda r, g: g * r / len(r) ** 0.5),
    "the sign of a mean's gradient": mean_with_rule(lambda r, g: jnp.sign(g) * r / r.size),
}


@pytest.mark.sampled(11)
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", EQUAL)
def test_a_rule_of_each_example_is_equal(name, count):
    check(EQUAL[name], PARAMS, BATCH, count)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", REFUSED)
def test_a_rule_that_joins_examples_is_refused(name, count):
    with pytest.raises(JoinedError, match=r"joins examples.*launcher\.per_slice"):
        check(REFUSED[name], PARAMS, BATCH, count)


def test_one_slice_takes_any_rule():
    def step(params, batch):
        return launcher.grad(mean_through(centred))(params, batch)

    assert trace_step(step, (PARAMS, BATCH)).loss(1).num_slices == 1


@pytest.mark.parametrize("layers", [2, 6])
def test_the_rule_of_equal_layers_is_traced_once(layers):
    traced = []

    def backward(x, g):
        traced.append(x.shape)
        return 0.5 * g

    layer = jax.jit(with_backward(jnp.tanh, backward))

    def loss(params, x):
        x = x @ params["a"]
        for _ in range(layers):
            x = layer(x)
        return jnp.mean(x**2)

    step = trace_step(launcher.value_and_grad(loss), (PARAMS, BATCH["x"]))
    step.loss(2)
    assert traced == [(ROWS, 6), (ROWS // 2, 6)]
