"""Products with the experts that tokens are sent to: each way to compute them is the plain one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import launcher
from launcher.partition.named_dims import NamedDims, Sharding
from launcher.plan import local_shape
from launcher.recipes.models.moe.routed import (
    fused_gradient,
    fused_product,
    gradient_in_tiles,
    product_in_tiles,
    routed,
)
from launcher.runtime import compile_step
from launcher.runtime.programs.partial_sums import emitted_locally
from launcher.trace import OWN_KERNELS, factors, flops, make_jaxpr, trace_step, walk

EXPERTS, CHOSEN, SIZE, WIDTH = 6, 2, 200, 144
PRODUCTS = {"tiles": product_in_tiles, "kernel": fused_product}
GRADIENTS = {"tiles": gradient_in_tiles, "kernel": fused_gradient}


def sent():
    """Experts of 2 x 150 tokens: none to the first, one to the second, and no multiple of 8."""
    choices = np.random.default_rng(0).permuted(np.tile(np.arange(2, EXPERTS), (300, 1)), axis=1)
    choices = choices[:, :CHOSEN]
    choices[7] = 1, 2
    counts = np.bincount(choices.reshape(-1), minlength=EXPERTS)
    assert [*counts[:2]] == [0, 1]
    assert (counts[2:] % 8).all()
    return jnp.asarray(choices.reshape(2, 150, CHOSEN), jnp.int32)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def by_hand(x, index, weights):
    """Each token's own copy of its experts' weights."""
    own = x[:, :, None] if x.ndim == 3 else x
    own = jnp.broadcast_to(own, (*index.shape, SIZE))
    made = jnp.einsum("btkm,btkmn->btkn", own, weights[index])
    return made if x.ndim == 3 else made.sum(2)


@pytest.mark.parametrize("each", [(), (CHOSEN,)], ids=["to_experts", "from_experts"])
@pytest.mark.parametrize("way", PRODUCTS)
def test_products_and_both_gradients_are_the_plain_ones(way, each, monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    x, index, weights = normal(0, 2, 150, *each, SIZE), sent(), normal(1, EXPERTS, SIZE, WIDTH)

    @jax.jit
    def both(x, weights, slope):
        forward = PRODUCTS[way](x, index, weights, is_turned=False)
        backward = PRODUCTS[way](slope, index, weights, is_turned=True)
        want, pullback = jax.vjp(lambda x, weights: by_hand(x, index, weights), x, weights)
        got = *forward, *backward, *GRADIENTS[way](EXPERTS, x, index, slope)
        return got, (want, *pullback(slope))

    shape = (2, 150, WIDTH) if each else (2, 150, CHOSEN, WIDTH)
    for got, want in zip(*both(x, weights, normal(2, *shape)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("way", PRODUCTS)
def test_what_is_no_number_stays_with_its_token_and_expert(way, poison, monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    x, index, weights = normal(0, 2, 150, SIZE), sent(), normal(1, EXPERTS, SIZE, WIDTH)
    sick = x.at[0, 7].set(poison)  # at the experts 1 and 2
    (made,) = jax.jit(functools.partial(PRODUCTS[way], is_turned=False))(sick, index, weights)
    slope, gradient = normal(2, 2, 150, CHOSEN, WIDTH), functools.partial(GRADIENTS[way], EXPERTS)
    (slopes,) = jax.jit(gradient)(sick, index, slope)
    fine = np.isfinite(np.asarray(made)).all(-1)
    assert not fine[0, 7].any()
    assert fine.sum() == fine.size - CHOSEN
    assert [*np.isfinite(np.asarray(slopes)).all((1, 2))] == [True, False, False, True, True, True]


def kernels_of(jaxpr):
    return [e for e in walk(jaxpr.eqns) if e.primitive.name in OWN_KERNELS]


def layer_and_gradients(rows=2, is_fused=True):
    """Two products, in and out of experts, and their gradients: a program for the planner."""
    index = jnp.asarray(np.arange(rows * 12 * 2).reshape(rows, 12, 2) % 4, jnp.int32)

    def of(*given):
        def layer(x, into, out):
            return routed(jnp.sin(routed(x, index, into, is_fused)), index, out, is_fused)

        made, pullback = jax.vjp(layer, *given)
        return made, pullback(made)

    return make_jaxpr(of, normal(0, rows, 12, 16), normal(1, 4, 16, 32), normal(2, 4, 32, 16))


@pytest.mark.parametrize("is_fused", [False, True])
def test_the_planner_prices_what_is_sent_and_cuts_rows_and_sizes(is_fused):
    found = kernels_of(layer_and_gradients(is_fused=is_fused))
    assert len(found) == 6
    way = "kernels" if is_fused else "gathered tiles"
    for eqn in found:
        assert eqn.params["of"].note.endswith(f"by {way}")
        assert flops(eqn) == 2 * (2 * 12 * 2) * 16 * 32  # tokens x chosen x size x width
        for factor in factors(eqn):
            cut = [eqn.invars[i].aval.shape[d] for i, d in factor.operands]
            cut += [eqn.outvars[i].aval.shape[d] for i, d in factor.results]
            assert len(set(cut)) == 1
        assert {len(factor.results) for factor in factors(eqn)} == {0, 1}


def test_each_device_calls_it_for_its_own_part():
    closed = layer_and_gradients()
    sharding = Sharding(NamedDims(closed.eqns), {"data": 2, "model": 2})
    sharding.seed(closed.invars[0], ("data", None, None))
    sharding.seed(closed.invars[1], (None, None, "model"))
    sharding.seed(closed.invars[2], (None, "model", None))
    emitted = emitted_locally(closed, sharding, 1)
    outside = walk(emitted.eqns, lambda e: e.primitive.name != "shard_map")
    assert not [e for e in outside if e.primitive.name in OWN_KERNELS]
    found = kernels_of(emitted)
    assert len(found) == 6
    assert {flops(e) for e in found} == {2 * (12 * 2) * 16 * 16}


METHODS = {
    "data_and_model": launcher.ThreeDParallel(2, 2, 1),
    "data": launcher.DataParallel(num_micro_batches=2),
    "zero3": launcher.Zero3Parallel(),
    "pipeline": launcher.PipeshardParallel(num_micro_batches=2),
}


@pytest.mark.devices(4)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_plans_of_it_train_as_one_device(method):
    def layer(weights, x):
        router, into, out = weights
        gates, index = jax.lax.top_k(jax.nn.softmax(x @ router), 2)
        inner = jnp.sin(routed(x, index, into, True))
        return x + routed(inner * gates[..., None], index, out, True)

    def loss(params, x):
        x = layer(params[0], x)
        launcher.mark_pipeline_boundary()
        return (layer(params[1], x) ** 2).mean()

    def step(params, x):
        value, grads = launcher.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shapes = (16, 4), (4, 16, 32), (4, 32, 16)
    params = [[normal(3 * k + i, *s) / 4 for i, s in enumerate(shapes)] for k in range(2)]
    given = params, normal(9, 8, 12, 16)
    want = jax.jit(step)(*given)
    traced = trace_step(step, given)
    plan = method.plan(traced, local_shape(4, 1, "cpu"))
    assert any("and no others: by kernels" in note for note in plan.notes)
    compiled = compile_step(traced, plan, jax.devices())
    got = jax.device_get(compiled(compiled.create(lambda: params), given[1]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
