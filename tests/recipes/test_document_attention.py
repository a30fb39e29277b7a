"""Attention within documents and windows: each way of computing it is the plain one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launcher.recipes.models.document_attention import (
    Backward,
    Forward,
    attend_since,
    first_seen,
)

LENGTH = 200
DOCUMENTS = (70, 1, 129)
WAYS = {"loop": False, "kernel": True}


def places():
    return jnp.concatenate([jnp.arange(n) for n in DOCUMENTS])[None]


def operands(heads=4, kv_heads=2, size=24, rows=2):
    def normal(seed, count):
        return jax.random.normal(jax.random.key(seed), (rows, LENGTH, count, size))

    return normal(0, heads), normal(1, kv_heads), normal(2, kv_heads)


def plain(query, key, value, first):
    at = jnp.arange(LENGTH)
    seen = (at <= at[:, None]) & (at >= first[:, :, None])
    return jax.nn.dot_product_attention(query, key, value, mask=seen[:, None])


def interpreted(query, key, value, first):
    """The kernels, by Pallas' interpreter, with their gradients."""

    @jax.custom_vjp
    def attend(*given):
        return Forward(True, interpret=True).fused(*given)[0]

    def forward(*given):
        out, sums = Forward(True, interpret=True).fused(*given)
        return out, (*given, out, sums)

    def backward(kept, slope):
        *given, out, sums = kept
        delta = jnp.swapaxes((slope * out).sum(-1), 1, 2)
        return *Backward(True, interpret=True).fused(*given, sums, delta, slope), None

    attend.defvjp(forward, backward)
    return attend(query, key, value, first)


def attend(way):
    return interpreted if way == "kernel" else functools.partial(attend_since, is_fused=False)


def with_gradients(attend, given, first, weights):
    def loss(*given):
        out = attend(*given, first)
        return jnp.sum(jnp.where(weights == 0, 0, out * weights)), out

    (_, out), slopes = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*given)
    return jax.tree.map(np.asarray, (out, *slopes))


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_plain_one_and_so_are_its_gradients(way, heads, window):
    given = operands(*heads)
    first = jnp.broadcast_to(first_seen(places(), window), (2, LENGTH))
    weights = jnp.cos(jnp.arange(given[0].size)).reshape(given[0].shape)
    got, want = (with_gradients(f, given, first, weights) for f in (attend(way), plain))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_reaches_another_document(way, poison):
    """Of the others neither results nor gradients change; its own results are no numbers."""
    given = operands(rows=1)
    first, sick = first_seen(places()), slice(DOCUMENTS[0], DOCUMENTS[0] + DOCUMENTS[1])
    poisoned = [x.at[:, sick].set(poison) for x in given]
    weights = jnp.cos(jnp.arange(given[0].size)).reshape(given[0].shape)
    got, want = (with_gradients(attend(way), x, first, weights) for x in (poisoned, given))
    for a, b in zip(got, want, strict=True):
        assert not np.isfinite(a[:, sick]).any()
        np.testing.assert_array_equal(np.delete(a, sick, 1), np.delete(b, sick, 1))
