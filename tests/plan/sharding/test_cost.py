"""What a cut costs: the work that is left on a device, and the bytes that are summed."""

import jax
import jax.numpy as jnp
import pytest

from launcher.plan import local_shape
from launcher.plan.sharding.cost import (
    all_reduce_seconds,
    backward_seconds,
    flow,
    forward_seconds,
    gather_seconds,
    is_active,
    load,
)
from launcher.plan.sharding.dims import NamedDims, Sharding
from launcher.trace.graph import inline_calls

SIZES = {"data": 2, "model": 4}


def shape(*lengths, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(lengths, dtype)


def loads(fun, operands, specs, wrt):
    """The load of every equation of a function whose operands are cut so."""
    closed = inline_calls(jax.make_jaxpr(fun)(*operands))
    invars = closed.jaxpr.invars
    cut = Sharding(NamedDims(closed.jaxpr.eqns), SIZES)
    for var, spec in zip(invars, specs, strict=True):
        cut.seed(var, spec)
    flows = flow(closed.jaxpr.eqns, [invars[i] for i in wrt])
    return [(use, load(use, cut, flows), is_active(use, flows)) for use in cut.dims.uses]


def product(x_spec, w_spec, wrt=(0, 1)):
    """Of `[8, 16] @ [16, 32]`, 8192 operations."""
    ((_, found, _),) = loads(
        lambda x, w: x @ w, (shape(8, 16), shape(16, 32)), (x_spec, w_spec), wrt
    )
    return found


@pytest.mark.parametrize(
    ("x", "w", "flops", "forward", "backward"),
    [
        ((None, None), (None, None), 8192, {}, {}),
        # By columns: each device has a part of what flows back to x.
        ((None, None), (None, "model"), 2048, {}, {"model": 8 * 16 * 4}),
        # By rows: each device has a part of the result.
        ((None, "model"), ("model", None), 2048, {"model": 8 * 32 * 4}, {}),
        # The batch: each device has a part of w's gradient.
        (("data", None), (None, None), 4096, {}, {"data": 16 * 32 * 4}),
        (("data", None), (None, "model"), 1024, {}, {"data": 16 * 8 * 4, "model": 4 * 16 * 4}),
    ],
)
def test_a_products_load(x, w, flops, forward, backward):
    found = product(x, w)
    assert found.product_flops_fp32 == flops
    assert (found.forward, found.backward) == (forward, backward)
    assert found.product_flops == found.other_flops == found.moved_bytes == 0


def test_no_gradient_is_summed_that_nobody_wants():
    assert product((None, None), (None, "model"), wrt=[1]).backward == {}
    assert product((None, None), (None, "model"), wrt=[]).backward == {}


def test_a_column_and_a_row_product_make_one_sum_each_way():
    def mlp(x, v, w):
        return jnp.tanh(x @ v) @ w

    specs = (None, None), (None, "model"), ("model", None)
    found = loads(mlp, (shape(8, 16), shape(16, 64), shape(64, 16)), specs, (0, 1, 2))
    total = [dict(one.forward) for _, one, _ in found], [dict(one.backward) for _, one, _ in found]
    assert total == ([{}, {}, {"model": 8 * 16 * 4}], [{"model": 8 * 16 * 4}, {}, {}])


def test_a_lookup_in_a_cut_table_is_summed():
    text = shape(8, 6, dtype=jnp.int32)
    found = loads(lambda t, i: t[i], (shape(32, 4), text), (("model", None), (None, None)), [0])
    lookups = [one for use, one, _ in found if use.eqn.primitive.name == "gather"]
    assert [one.forward for one in lookups] == [{"model": 8 * 6 * 4 * 4}]
    assert [one.backward for one in lookups] == [{}]


def test_what_has_no_rule_is_gathered_and_done_everywhere():
    found = loads(jnp.linalg.cholesky, (shape(4, 8, 8),), (("model", None, None),), [0])
    (unknown,) = [one for use, one, _ in found if use.eqn.primitive.name == "cholesky"]
    assert unknown.forward == {"model": 8 * 8 * 4}


def test_a_body_counts_as_often_as_it_runs():
    def fun(x, w):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, 5)[0]

    found = loads(fun, (shape(8, 16), shape(16, 16)), ((None, "model"), (None, None)), (0, 1))
    (turn,) = [one for use, one, _ in found if use.eqn.primitive.name == "dot_general"]
    # Both sides of w are cut, but by one axis: the sum is scattered, half an all-reduce each way.
    assert turn.product_flops_fp32 == 5 * 2 * 8 * 16 * 16 / 4
    assert turn.forward == turn.backward == {"model": 5 * 8 * 16 * 4 / 2}


def test_gradients_flow_from_the_sources_on():
    def fun(x, w):
        mask = jnp.sin(x)
        return (mask * (x @ w)).sum()

    found = loads(fun, (shape(8, 16), shape(16, 16)), ((None,), (None,)), [1])
    assert [use.eqn.primitive.name for use, _, active in found if not active] == ["sin"]


def test_rings():
    assert all_reduce_seconds(800.0, 4, 100.0, 0.5) == pytest.approx(2 * 3 * (2.0 + 0.5))
    assert gather_seconds(800.0, 4, 100.0, 0.5) == pytest.approx(3 * (2.0 + 0.5))
    assert all_reduce_seconds(800.0, 1, 100.0, 0.5) == all_reduce_seconds(0.0, 4, 100.0, 0.5) == 0


def test_seconds_of_a_load():
    cluster = local_shape(8, 1, "cpu")
    link = cluster.intra_host
    alone = product((None, None), (None, None))
    assert forward_seconds(alone, SIZES, cluster, link) == pytest.approx(8192 / cluster.flops)
    assert backward_seconds(alone, SIZES, cluster, link) == pytest.approx(2 * 8192 / cluster.flops)
    rows = product((None, "model"), ("model", None))
    summed = all_reduce_seconds(8 * 32 * 4, 4, link, cluster.latency)
    assert forward_seconds(rows, SIZES, cluster, link) == pytest.approx(
        2048 / cluster.flops + summed
    )
