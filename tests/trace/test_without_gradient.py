"""Which parameters are told to get no gradient."""

import jax
import jax.numpy as jnp
import pytest

import launcher
from launcher.plan import local_shape
from launcher.plan.methods import DataParallel
from launcher.trace import trace_step
from launcher.trace.step import no_gradient_note

W = jax.ShapeDtypeStruct((4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((8, 4), jnp.float32)
WHY = "or only through stop_gradient or whole numbers"


def traced(loss, params):
    def step(params, x):
        value, grads = launcher.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - g, params, grads), value

    return trace_step(step, (params, X))


@jax.custom_vjp
def straight_through(w):
    return jnp.round(w)


straight_through.defvjp(lambda w: (jnp.round(w), None), lambda _, g: (g,))


@pytest.mark.parametrize(
    ("through", "said"),
    [
        (lambda w, x: x @ w, False),
        (lambda w, x: x, True),
        (lambda w, x: x @ jax.lax.stop_gradient(w), True),
        (lambda w, x: x + jnp.argmax(w), True),
        (lambda w, x: x + jnp.round(w).sum(), True),
        (lambda w, x: x + straight_through(w).sum(), False),
        (lambda w, x: jnp.where(w.sum() > 0, x, 2 * x), True),
        (jax.checkpoint(lambda w, x: x @ jax.lax.stop_gradient(w)), True),
        (jax.checkpoint(lambda w, x: jnp.tanh(x @ w)), False),
        (lambda w, x: jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=2)[0], False),
    ],
)
def test_a_parameter_is_named_if_no_gradient_reaches_it(through, said):
    def loss(params, x):
        return jnp.mean(through(params["w"], x @ params["used"]) ** 2)

    step = traced(loss, {"used": W, "w": W})
    expected = f"no gradient reaches 0.w: the loss does not depend on it, {WHY}"
    assert no_gradient_note(step) == (expected if said else None)


def test_many_are_counted_and_the_plan_says_it():
    step = traced(lambda params, x: jnp.mean(x @ params[0]), [W] * 7)
    expected = (
        "no gradient reaches 0.1, 0.2, 0.3, 0.4 and 2 more: the loss does not depend on them, "
        f"{WHY}"
    )
    assert no_gradient_note(step) == expected
    assert DataParallel().plan(step, local_shape(1, 1, "cpu")).notes == (expected,)


def test_an_evaluation_has_no_gradients_to_miss():
    step = trace_step(launcher.microbatched(lambda w, x: jnp.mean(x)), (W, X), donate_argnums=())
    assert no_gradient_note(step) is None
