"""Outside a parallelized step the public functions are JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.trace import GradientError


def loss(params, x, key=None):
    launcher.mark_pipeline_boundary()
    h = jnp.tanh(x @ params["w"])
    return (h**2).sum(), {"rows": h, "n": jnp.int32(3)}


PARAMS = {"w": jnp.arange(12.0).reshape(4, 3) / 10}
X = jnp.arange(8.0).reshape(2, 4) / 10


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
@pytest.mark.parametrize("argnums", [0, 1, (1, 0), -1])
def test_value_and_grad_is_jaxs(wrap, argnums):
    ours = wrap(launcher.value_and_grad(loss, argnums, has_aux=True))(PARAMS, X)
    want = jax.value_and_grad(loss, argnums if argnums != -1 else 1, has_aux=True)(PARAMS, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, want)


def test_grad_and_closures():
    def of(x):
        return launcher.grad(lambda p: (p["w"] * x).sum() ** 2)({"w": x + 1})

    want = jax.grad(lambda p, x: (p["w"] * x).sum() ** 2)({"w": X + 1}, X)
    for got in (of(X), jax.jit(of)(X)):
        np.testing.assert_allclose(got["w"], want["w"], rtol=1e-6)


def test_microbatched_is_the_function_itself():
    out = launcher.microbatched(lambda p, x: loss(p, x)[1], reduce={"rows": "concat", "n": "last"})
    np.testing.assert_allclose(out(PARAMS, X)["rows"], loss(PARAMS, X)[1]["rows"], rtol=1e-6)


def test_marks_are_invisible_to_jax_transformations():
    assert jax.vmap(lambda x: loss(PARAMS, x[None])[0])(X).shape == (2,)
    jax.grad(lambda p: loss(p, X)[0])(PARAMS)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: launcher.grad(lambda p: p)(X), TypeError, "one floating-point number"),
        (lambda: launcher.grad(lambda n: n * 1.0)(jnp.int32(1)), TypeError, "dtype int32"),
        (lambda: launcher.grad(jnp.sum, reduce="avg")(X), GradientError, "mean, sum, concat"),
        (lambda: launcher.grad(jnp.sum, reduce="last")(X), GradientError, "'last'"),
        (lambda: launcher.grad(jnp.sum, has_aux=True)(X), TypeError, r"\(loss, aux\)"),
    ],
)
def test_misuse_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()
