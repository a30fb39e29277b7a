"""Products that come out transposed are multiplied the other way round, with the same result."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from launcher.partition.transposes import without_transposes
from launcher.trace.ir.jaxpr import jaxpr_as_fun, make_jaxpr

# Of a product with the dimensions (batch, left, left, right): which permutations put `right` first.
LEFT, RIGHT = jnp.zeros((2, 3, 4, 5)), jnp.zeros((2, 5, 6))


def names(closed):
    return [eqn.primitive.name for eqn in closed.eqns]


def random_like(key, x):
    return jax.random.normal(jax.random.key(key), x.shape)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("permutation", [*itertools.permutations(range(4))][1:])
def test_only_swapped_operands_are_folded_and_values_stay(permutation):
    def fun(a, b):
        product = lax.dot_general(a, b, (((3,), (1,)), ((0,), (0,))), precision=("high", "highest"))
        return lax.transpose(product, permutation)

    before = make_jaxpr(fun, LEFT, RIGHT)
    after = without_transposes(before)
    is_swap = permutation == (0, 3, 1, 2)
    assert names(after) == (["dot_general"] if is_swap else ["dot_general", "transpose"])
    if is_swap:
        assert after.eqns[0].params["precision"] == before.eqns[0].params["precision"][::-1]
    values = random_like(0, LEFT), random_like(1, RIGHT)
    (given,), (made,) = jaxpr_as_fun(before)(*values), jaxpr_as_fun(after)(*values)
    assert given.shape == made.shape
    np.testing.assert_allclose(given, made, rtol=1e-5, atol=1e-6)


def test_programs_that_are_no_bodies_and_literals_stay():
    def fun(a, b):
        return jnp.linalg.solve(a, b) * lax.transpose(2.0, ())

    a, b = jnp.eye(3) * 2 + 0.1, jnp.ones(3)
    closed = make_jaxpr(fun, a, b)
    (made,) = jaxpr_as_fun(without_transposes(closed))(a, b)
    np.testing.assert_allclose(made, fun(a, b), rtol=1e-6)


@pytest.mark.parametrize(("tokens", "swaps"), [(64, True), (512, False)])
def test_a_wide_operand_is_not_copied_to_save_a_small_transposition(tokens, swaps):
    narrow, wide = jnp.zeros((tokens, 64)), jnp.zeros((tokens, 256))

    def gradient(cotangent, x):  # of the second product of an MLP, both contracted over the tokens
        return lax.dot_general(cotangent, x, (((0,), (0,)), ((), ()))).T

    expected = ["dot_general"] if swaps else ["dot_general", "transpose"]
    assert names(without_transposes(make_jaxpr(gradient, narrow, wide))) == expected


def test_a_product_that_is_read_twice_stays():
    def fun(a, b):
        product = a @ b
        return product.T, product + 1

    closed = make_jaxpr(fun, jnp.zeros((2, 3)), jnp.zeros((3, 4)))
    assert names(without_transposes(closed)) == names(closed)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
def test_gradients_of_weights_have_no_transpositions_in_loops_and_checkpoints_too(wrap):
    def loss(w, x):
        def body(x, w):
            return jnp.tanh(x @ w), None

        return lax.scan(wrap(body), x, w)[0].sum()

    given = jnp.zeros((3, 8, 8)), jnp.zeros((4, 8))
    closed = make_jaxpr(jax.grad(loss), *given)
    after = without_transposes(closed)
    assert " transpose[" in str(closed)
    assert " transpose[" not in str(after)
    values = [random_like(k, x) for k, x in enumerate(given)]
    (before,), (made,) = jaxpr_as_fun(closed)(*values), jaxpr_as_fun(after)(*values)
    np.testing.assert_allclose(before, made, rtol=1e-6, atol=1e-6)
