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


def test_what_is_no_array_reaches_the_loss_as_it_is():
    def of(w, x, power, *, act, name=None, flip=False):
        assert isinstance(power, int)
        assert flip is True
        return act((x @ w) ** power).sum(), {"name": jnp.int32(len(name))}

    def with_grad(value_and_grad):
        both = value_and_grad(of, has_aux=True)
        return both(PARAMS["w"], X, 3, act=jnp.sin, name="abc", flip=True)

    ours, want = with_grad(launcher.value_and_grad), with_grad(jax.value_and_grad)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, want)


TRANSFORMATIONS = {
    "grad of grad": lambda f: jax.grad(lambda w: (f(w, X)[1] ** 3).sum())(PARAMS["w"]),
    "hessian": lambda f: jax.hessian(lambda w: f(w, X)[0][0])(PARAMS["w"]),
    "jvp": lambda f: jax.jvp(lambda w, x: f(w, x)[::1], (PARAMS["w"], X), (PARAMS["w"], X))[1][1],
    "linearize": lambda f: jax.linearize(lambda w: f(w, X)[1], PARAMS["w"])[1](PARAMS["w"]),
    "vmap": lambda f: jax.vmap(lambda x: f(PARAMS["w"], x[None])[1])(X),
    "jit of vmap of grad": lambda f: jax.jit(
        jax.vmap(jax.grad(lambda w, x: f(w, x[None])[1].sum()), in_axes=(None, 0))
    )(PARAMS["w"], X),
    "checkpoint in scan": lambda f: jax.lax.scan(
        jax.checkpoint(lambda w, x: (w - f(w, x[None])[1], None)), PARAMS["w"], X
    )[0],
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_it_transforms_as_jaxs_does(name):
    def of(w, x):
        return jnp.tanh(x @ w).mean() ** 2, {"n": jnp.int32(2)}

    ours, want = (
        jax.jit(lambda both=both: TRANSFORMATIONS[name](both(of, has_aux=True)))()
        for both in (launcher.value_and_grad, jax.value_and_grad)
    )
    np.testing.assert_allclose(ours, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: launcher.grad(jnp.sum)("x"), TypeError, "a leaf that is a str"),
        (lambda: launcher.grad(jnp.sum, 1)(X), GradientError, "names argument 1, but .* given 1"),
        (
            lambda: launcher.grad(loss, has_aux=True, reduce=("mean", {"a": "sum"}))(PARAMS, X),
            GradientError,
            "does not fit what the loss returns",
        ),
        (lambda: launcher.grad(lambda n: n * 1.0)(jnp.int32(1)), TypeError, "dtype int32"),
        (
            lambda: launcher.grad(jnp.sum, reduce="avg")(X),
            GradientError,
            "infer, mean, sum, max, min, concat, last",
        ),
        (lambda: launcher.grad(jnp.sum, reduce="last")(X), GradientError, "'last'"),
        (lambda: launcher.grad(jnp.sum, has_aux=True)(X), TypeError, r"\(loss, aux\)"),
    ],
)
def test_misuse_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()
