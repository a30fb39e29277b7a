"""Programs take what they only read in fewer bits in these, and compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launcher.partition.narrow_reads import narrow_reads, taking
from launcher.trace import inline_calls, jaxpr_as_fun, make_jaxpr

BF16 = jnp.bfloat16
W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 6)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(3, 6)), BF16)
ROWS = jnp.asarray([2, 0, 7], jnp.int32)


def through(layers):
    return jax.lax.scan(lambda x, w: (x @ w.astype(BF16), None), X, layers)[0]


def once(w):
    return X @ w[0].astype(BF16)


def to_the_end_of_a_loop(w):
    return jax.lax.fori_loop(0, 2, lambda _, x: x @ w[1].astype(BF16), X)


def either(w):
    return jax.lax.cond(X[0, 0] > 0, once, lambda w: X - w[0, 0].astype(BF16), w)


def carried(w):
    return jax.lax.scan(lambda w, _: (w + 1, w.astype(BF16)), w, length=2)[1]


@jax.custom_vjp
def with_a_rule(w):
    return once(w)


with_a_rule.defvjp(lambda w: (once(w), w), lambda w, _: (w,))

NARROW = {
    "cast": once,
    "transposed and cast": lambda w: X @ w[1].T.astype(BF16),
    "looked up and cast": lambda w: w.reshape(-1, 6)[ROWS].astype(BF16),
    "part of it, by number": lambda w: jax.lax.dynamic_index_in_dim(w, ROWS[0], 0).astype(BF16),
    "behind a barrier": lambda w: once(jax.lax.optimization_barrier((w, X))[0]),
    "in a checkpoint": lambda w: jax.checkpoint(once)(w),
    "rows of a scan": through,
    "the same in each row": to_the_end_of_a_loop,
    "in both branches": either,
    "in a scan of checkpoints": jax.checkpoint(through),
    "twice": lambda w: once(w) + X @ w[2].astype(BF16),
}
WIDE = {
    "as it is": lambda w: (once(w), w.sum()),
    "returned": lambda w: (once(w), w),
    "added before the cast": lambda w: (w + 1).astype(BF16),
    "cast to two types": lambda w: (w.astype(BF16), w.astype(jnp.float16)),
    "cast to integers": lambda w: w.astype(jnp.int8),
    "carried from row to row": carried,
    "in one branch alone": lambda w: jax.lax.cond(
        X[0, 0] > 0, once, lambda w: X - w[0, 0].sum().astype(BF16), w
    ),
    "under a rule for its derivative": with_a_rule,
}


@pytest.mark.parametrize("fun", NARROW.values(), ids=NARROW)
def test_what_is_only_read_narrower_is_taken_so(fun):
    program = inline_calls(make_jaxpr(fun, W))
    (w,) = program.invars
    assert narrow_reads(program)[w] == "bfloat16"
    narrow = taking(program, {w: "bfloat16"})
    assert narrow.invars[0].aval.dtype == BF16
    for had, has in zip(
        jaxpr_as_fun(program)(W), jaxpr_as_fun(narrow)(W.astype(BF16)), strict=True
    ):
        assert had.dtype == has.dtype
        np.testing.assert_array_equal(had, has)


@pytest.mark.parametrize("fun", NARROW.values(), ids=NARROW)
def test_its_gradients_read_it_so(fun):
    def gradient(w, seed):
        out, pullback = jax.vjp(fun, w)
        return pullback(jnp.ones_like(out) * seed)

    program = inline_calls(make_jaxpr(gradient, W, jnp.ones((), BF16)))
    w, types = program.invars[0], narrow_reads(program)
    narrow = taking(program, {w: types[w]})
    seed = jnp.full((), 3, BF16)
    (had,), (has,) = (
        jaxpr_as_fun(each)(W.astype(each.invars[0].aval.dtype), seed) for each in (program, narrow)
    )
    assert had.dtype == has.dtype == jnp.float32
    np.testing.assert_array_equal(had, has)


@pytest.mark.parametrize("fun", WIDE.values(), ids=WIDE)
def test_what_is_read_as_it_is_stays_so(fun):
    program = inline_calls(make_jaxpr(fun, W))
    assert program.invars[0] not in narrow_reads(program)
