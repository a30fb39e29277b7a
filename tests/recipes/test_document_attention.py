"""Attention within documents and windows: each way of computing it is the plain one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from launcher.recipes.models.document_attention import (
    attend_since,
    first_seen,
    fused_backward,
    fused_forward,
)

LENGTH = 200
DOCUMENTS = (70, 1, 129)
WAYS = "loop", "kernel"


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


@pytest.fixture
def attend(way, monkeypatch):
    """Attention by the loop, or by the kernels in Pallas' interpreter."""
    if way == "loop":
        return functools.partial(attend_since, is_fused=False)
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))

    @jax.custom_vjp
    def attend(*given):
        return fused_forward(*given)[0]

    def forward(*given):
        out, sums = fused_forward(*given)
        return out, (*given, sums, out)

    def backward(kept, slope):
        *given, out = kept
        delta = jnp.swapaxes((slope * out).sum(-1), 1, 2)
        return *fused_backward(*given, delta, slope), None

    attend.defvjp(forward, backward)
    return attend


def with_gradients(attend, given, first, weights):
    def loss(*given):
        out = attend(*given, first)
        return jnp.sum(jnp.where(weights == 0, 0, out * weights)), out

    (_, out), slopes = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*given)
    return jax.tree.map(np.asarray, (out, *slopes))


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_plain_one_and_so_are_its_gradients(attend, heads, window):
    given = operands(*heads)
    first = jnp.broadcast_to(first_seen(places(), window), (2, LENGTH))
    weights = jnp.cos(jnp.arange(given[0].size)).reshape(given[0].shape)
    got, want = (with_gradients(f, given, first, weights) for f in (attend, plain))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_reaches_another_document(attend, poison):
    """Of the others neither results nor gradients change; its own results are no numbers."""
    given = operands(rows=1)
    first, sick = first_seen(places()), slice(DOCUMENTS[0], DOCUMENTS[0] + DOCUMENTS[1])
    poisoned = [x.at[:, sick].set(poison) for x in given]
    weights = jnp.cos(jnp.arange(given[0].size)).reshape(given[0].shape)
    got, want = (with_gradients(attend, x, first, weights) for x in (poisoned, given))
    for a, b in zip(got, want, strict=True):
        assert not np.isfinite(a[:, sick]).any()
        np.testing.assert_array_equal(np.delete(a, sick, 1), np.delete(b, sick, 1))
