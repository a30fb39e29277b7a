"""The cost of sharding: the work that is left on a device, and the bytes that are all-reduced."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import pytest

from launcher.partition.named_dims import NamedDims, Sharding
from launcher.plan import local_shape
from launcher.plan.cost.collectives import (
    Collective,
    equation_load,
    flow,
    is_active,
    seconds,
)
from launcher.plan.cost.collectives import loads as all_loads
from launcher.plan.cost.formulas import all_reduce_seconds
from launcher.trace.ir.jaxpr import inline_calls, make_jaxpr
from launcher.trace.ir.kernels import Kernel, call_kernel

FORWARD, BACKWARD = operator.attrgetter("forward"), operator.attrgetter("backward")
SIZES = {"data": 2, "model": 4}


def shape(*lengths, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(lengths, dtype)


def loads(fun, operands, specs, wrt):
    """The load of every equation of a function whose operands are cut so."""
    closed = inline_calls(make_jaxpr(fun, *operands))
    invars = closed.invars
    cut = Sharding(NamedDims(closed.eqns), SIZES)
    for var, spec in zip(invars, specs, strict=True):
        cut.seed(var, spec)
    flows = flow(closed.eqns, [invars[i] for i in wrt])
    return [(use, equation_load(use, cut, flows), is_active(use, flows)) for use in cut.dims.uses]


def crossing(collectives):
    """Bytes of each all-reduce by axis, of each other kind by `(kind, axis)`."""
    found = {}
    for one in collectives:
        key = one.axis if one.kind == "all-reduce" else (one.kind, one.axis)
        assert key not in found
        found[key] = one.times * one.size
    return found


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
    assert (crossing(found.forward), crossing(found.backward)) == (forward, backward)
    assert found.product_flops == found.other_flops == found.moved_bytes == 0


@pytest.mark.parametrize("axis", [None, "model"])
def test_what_is_repeated_where_it_is_read_moves_nothing(axis):
    """A mask and what is masked with, of all heads, are no array of a device with some heads."""

    def masked(scores):
        return jnp.where(jnp.tril(jnp.ones((16, 16), bool)), scores, -1e9)

    every = loads(masked, [shape(2, 8, 16, 16)], [(None, axis, None, None)], (0,))
    moved = max(load.moved_bytes for _, load, _ in every)
    assert moved == 2 * 8 * 16 * 16 * (1 + 4 + 4 + 4) / (SIZES[axis] if axis else 1)


def batched(dims, x, w, dtype=jnp.bfloat16):
    """The load of a product of batches of matrices."""
    given = shape(*x, dtype=dtype), shape(*w, dtype=dtype)
    whole = (None,) * len(x), (None,) * len(w)
    every = loads(functools.partial(jnp.einsum, dims), given, whole, (0, 1))
    (found,) = (load for use, load, _ in every if use.eqn.primitive.name == "dot_general")
    return found


@pytest.mark.parametrize(
    ("dims", "x", "w", "is_slow"),
    [
        ("bqhd,bkhd->bhqk", (2, 64, 3, 108), (2, 128, 3, 108), False),  # a short sequence
        ("bqhd,bkhd->bhqk", (2, 256, 3, 108), (2, 256, 3, 108), True),
        ("bhqk,bkhd->bqhd", (2, 3, 256, 256), (2, 256, 3, 108), True),
        ("bqhd,bkhd->bhqk", (2, 197, 3, 64), (2, 197, 3, 64), False),  # a picture's patches
        ("bhqk,bkhd->bqhd", (2, 3, 197, 197), (2, 197, 3, 64), False),
        ("ebgpm,emh->ebgph", (4, 32, 1, 80, 128), (4, 128, 256), False),  # experts
    ],
)
def test_products_of_heads_that_tensor_cores_do_not_take_are_slow(dims, x, w, is_slow):
    found = batched(dims, x, w)
    assert found.unaligned_flops == (found.product_flops if is_slow else 0.0)
    assert batched(dims, x, w, jnp.float32).unaligned_flops == 0.0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("is_attention", [False, True])
def test_only_kernels_of_attention_in_16_bits_run_at_its_rate(is_attention, dtype):
    def double(x):
        return [2 * x]

    places = ((((0, 0),), ((0, 0),)),)
    own = Kernel("", double, double, places, lambda avals: 7.0, is_attention=is_attention)
    ((_, found, _),) = loads(
        lambda x: call_kernel(own, x)[0], (shape(4, dtype=dtype),), ((None,),), (0,)
    )
    work = found.product_flops, found.product_flops_fp32, found.attention_flops
    at = 1 if dtype == jnp.float32 else 2 * is_attention
    assert work == tuple(7.0 * (i == at) for i in range(3))


def test_no_gradient_is_summed_that_nobody_wants():
    assert product((None, None), (None, "model"), wrt=[1]).backward == ()
    assert product((None, None), (None, "model"), wrt=[]).backward == ()


def test_a_column_and_a_row_product_make_one_sum_each_way():
    def mlp(x, v, w):
        return jnp.tanh(x @ v) @ w

    specs = (None, None), (None, "model"), ("model", None)
    found = loads(mlp, (shape(8, 16), shape(16, 64), shape(64, 16)), specs, (0, 1, 2))
    total = tuple([crossing(of(one)) for _, one, _ in found] for of in (FORWARD, BACKWARD))
    assert total == ([{}, {}, {"model": 8 * 16 * 4}], [{"model": 8 * 16 * 4}, {}, {}])


def test_a_lookup_in_a_cut_table_is_summed():
    text = shape(8, 6, dtype=jnp.int32)
    found = loads(lambda t, i: t[i], (shape(32, 4), text), (("model", None), (None, None)), [0])
    lookups = [one for use, one, _ in found if use.eqn.primitive.name == "gather"]
    assert [crossing(one.forward) for one in lookups] == [{"model": 8 * 6 * 4 * 4}]
    assert [one.backward for one in lookups] == [()]


def test_what_has_no_rule_is_gathered_and_done_everywhere():
    found = loads(jnp.linalg.cholesky, (shape(4, 8, 8),), (("model", None, None),), [0])
    (unknown,) = [one for use, one, _ in found if use.eqn.primitive.name == "cholesky"]
    assert crossing(unknown.forward) == {("all-gather", "model"): 4 * 8 * 8 * 4}


def scores(q, k):
    return jnp.einsum("bqh,bkh->bqk", q, k)


def test_an_operand_is_gathered_that_is_cut_where_the_result_is_not():
    """Attention along a sequence that is cut: each device has scores of its own queries and all
    keys. The keys are gathered in both passes, and their gradient is scattered."""
    keys = 2 * 8 * 16 * 4
    specs = (None, "model", None), (None, "model", None)
    closed = make_jaxpr(lambda x: scores(x, 2 * x), shape(2, 8, 16))
    dims = NamedDims(closed.eqns)
    cut = Sharding(dims, SIZES)
    cut.seed(closed.invars[0], specs[0])
    flows = flow(closed.eqns, closed.invars)
    (found,) = [
        equation_load(u, cut, flows) for u in dims.uses if u.eqn.primitive.name == "dot_general"
    ]
    assert found.product_flops_fp32 == 2 * 2 * 8 * 8 * 16 / 4
    assert crossing(found.forward) == {("all-gather", "model"): keys}
    both = {("all-gather", "model"): keys, ("reduce-scatter", "model"): keys}
    assert crossing(found.backward) == both


def test_a_dimension_that_has_to_be_whole_is_gathered():
    found = loads(lambda x: jnp.cumsum(x, 1), (shape(8, 16),), ((None, "model"),), [0])
    sums = [one for use, one, _ in found if use.eqn.primitive.name == "cumsum"]
    assert [crossing(one.forward) for one in sums] == [{("all-gather", "model"): 8 * 16 * 4}]


def test_parts_of_a_gradient_are_summed_once():
    """Of three products by columns of one value, which two of them read in another form."""

    def three(x, a, b, c):
        turned = x.T
        return (x @ a).sum() + (turned.T @ b).sum() + (turned.T @ c).sum()

    shapes = (shape(8, 16), *[shape(16, 32)] * 3)
    closed = inline_calls(make_jaxpr(three, *shapes))
    cut = Sharding(NamedDims(closed.eqns), SIZES)
    for var in closed.invars[1:]:
        cut.seed(var, (None, "model"))
    flows = flow(closed.eqns, closed.invars)
    found = (c for _, one in all_loads(cut, flows) for c in (*one.forward, *one.backward))
    sums = [c for c in found if c.size == 8 * 16 * 4]
    assert [(c.kind, c.axis) for c in sums] == [("all-reduce", "model")]


def test_parts_of_a_gradient_that_are_cast_down_are_summed_before():
    """One product reads a value as it is, another in more bits, as a mixture's router does."""

    def two(x, a, b):
        return (x @ a).sum() + (x.astype(jnp.float32) @ b).sum().astype(x.dtype)

    x, a = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((8, 16), (16, 32)))
    closed = inline_calls(make_jaxpr(two, x, a, shape(16, 32)))
    cut = Sharding(NamedDims(closed.eqns), SIZES)
    for var in closed.invars[1:]:
        cut.seed(var, (None, "model"))
    found = (c for _, one in all_loads(cut, flow(closed.eqns, closed.invars)) for c in one.backward)
    assert sorted(c.size for c in found if c.of) == [8 * 16 * 2, 8 * 16 * 4]


def test_what_is_no_real_number_has_no_gradient():
    def fun(x, w):
        hot = jax.nn.one_hot(jnp.argmax(x, -1), 16)
        return ((hot + jax.lax.stop_gradient(x)) @ w).sum()

    found = loads(fun, (shape(8, 16), shape(16, 32)), ((None, None), (None, "model")), [0])
    assert [one.backward for _, one, _ in found if one.backward] == []


def test_a_body_counts_as_often_as_it_runs():
    def fun(x, w):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, 5)[0]

    found = loads(fun, (shape(8, 16), shape(16, 16)), ((None, "model"), (None, None)), (0, 1))
    (turn,) = [one for use, one, _ in found if use.eqn.primitive.name == "dot_general"]
    # Both sides of w are cut, but by one axis: the sum is scattered, and its gradient gathered.
    assert turn.product_flops_fp32 == 5 * 2 * 8 * 16 * 16 / 4
    assert crossing(turn.forward) == {("reduce-scatter", "model"): 5 * 8 * 16 * 4}
    assert crossing(turn.backward) == {("all-gather", "model"): 5 * 8 * 16 * 4}


def test_gradients_flow_from_the_sources_on():
    def fun(x, w):
        mask = jnp.sin(x)
        return (mask * (x @ w)).sum()

    found = loads(fun, (shape(8, 16), shape(16, 16)), ((None,), (None,)), [1])
    assert [use.eqn.primitive.name for use, _, active in found if not active] == ["sin"]


def test_rings():
    ring = dataclasses.replace(local_shape(8, 1, "cpu"), latency=0.5)
    whole = Collective("all-reduce", "model", 800.0).seconds(SIZES, 100.0, ring)
    assert whole == pytest.approx(2 * 3 * (2.0 + 0.5))
    for kind in ("all-gather", "reduce-scatter"):
        half = Collective(kind, "model", 800.0, times=3).seconds(SIZES, 100.0, ring)
        assert half == pytest.approx(3 * 3 * (2.0 + 0.5))
    assert Collective("all-reduce", "data", 800.0).seconds({"data": 1}, 100.0, ring) == 0
    assert Collective("all-reduce", "model", 0.0).seconds(SIZES, 100.0, ring) == 0
    of_bytes = Collective("all-reduce", "model", 800.0).seconds(SIZES, 100.0, ring, starts=False)
    assert of_bytes == 12.0
    tree = dataclasses.replace(ring, device_kind="H100")
    found = Collective("all-reduce", "model", 800.0).seconds(SIZES, 100.0, tree)
    assert found == pytest.approx(12.0 + 2 * 2 * 0.5)  # up and down two levels


def test_seconds_of_a_load():
    cluster = local_shape(8, 1, "cpu")
    link = cluster.intra_host
    alone = product((None, None), (None, None))
    assert seconds(alone, SIZES, cluster, link) == pytest.approx(3 * 8192 / cluster.flops)
    rows = product((None, "model"), ("model", None))
    summed = all_reduce_seconds(8 * 32 * 4, 4, link, cluster.start_seconds(4))
    assert seconds(rows, SIZES, cluster, link) == pytest.approx(3 * 2048 / cluster.flops + summed)
