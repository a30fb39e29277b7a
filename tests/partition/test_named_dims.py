"""Named dimensions: what runs together over a program, its loops, branches and calls included."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from launcher.partition.named_dims import NamedDims, Sharding, axes, parts, without
from launcher.trace.ir.jaxpr import inline_calls, make_jaxpr


def shape(*lengths):
    return jax.ShapeDtypeStruct(lengths, jnp.float32)


def named(fun, *operands):
    """The named dimensions of a function, its inputs and its results."""
    closed = inline_calls(make_jaxpr(fun, *operands))
    return NamedDims(closed.eqns), closed.invars, closed.outvars


def letters(dims, *values):
    """Each value's classes as letters, in the order of their first use: equal letters run
    together."""
    known = {}
    return [
        "".join(known.setdefault(of, "abcdefghijk"[len(known)]) for of in dims.classes(v))
        for v in values
    ]


def test_a_product_joins_what_it_keeps_and_what_it_sums():
    dims, (x, w), (y,) = named(lambda x, w: x @ w, shape(4, 6), shape(6, 8))
    assert letters(dims, x, w, y) == ["ab", "bc", "ac"]
    (use,) = dims.uses
    assert (use.scope, use.times) == (0, 1)


def test_attention_has_one_class_for_its_heads():
    def attention(x, qkv, out):
        q, k, v = jnp.moveaxis((x @ qkv).reshape(2, 8, 3, 4, 5), 2, 0)
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(2, 8, 20) @ out

    dims, (_, qkv, out), _ = named(attention, shape(2, 8, 6), shape(6, 60), shape(20, 6))
    # Three of the split dimension's 60 are q, k and v: nothing runs with the heads before that.
    assert dims.classes(qkv)[1] != dims.classes(out)[0]
    split = named(lambda x, q, o: (x @ q).reshape(2, 8, 4, 5).reshape(2, 8, 20) @ o,
                  shape(2, 8, 6), shape(6, 20), shape(20, 6))  # fmt: skip
    dims, (_, q, o), _ = split
    heads = dims.classes(q)[1]
    assert heads == dims.classes(o)[0]
    assert dims.size(heads) == 4  # into more parts it cannot be cut without cutting heads


@pytest.mark.parametrize(
    ("fun", "operands", "want"),
    [
        (lambda x: x.reshape(12, 4), (shape(2, 6, 4),), ["abc", "ac"]),
        (lambda x: x.reshape(2, 6, 4), (shape(12, 4),), ["ab", "acb"]),
        (lambda x, y: x + y, (shape(4, 6), shape(1, 6)), ["ab", "cb", "ab"]),
        (lambda x: (x.T, x.sum(0)), (shape(4, 6),), ["ab", "ba", "b"]),
        (lambda x: jnp.concatenate([x, x], 1), (shape(4, 6),), ["ab", "ac"]),
    ],
    ids=["merge", "split", "stretched", "transpose and sum", "concatenate"],
)
def test_shapes_that_change(fun, operands, want):
    dims, ins, outs = named(fun, *operands)
    assert letters(dims, *ins, *outs) == want


def layer(h, w):
    return jnp.tanh(h @ w)


def test_a_scans_body_runs_with_what_is_around_it():
    def fun(h, const, stacked):
        return lax.scan(lambda h, w: (layer(h, w) + const, h.sum(0)), h, stacked)

    dims, (h, const, stacked), (last, sums) = named(fun, shape(4, 6), shape(4, 6), shape(3, 6, 6))
    # The carry makes the product's two sides one class; the turns stay apart.
    assert letters(dims, h, const, stacked, last, sums) == ["ab", "ab", "cbb", "ab", "db"]
    product = next(use for use in dims.uses if use.eqn.primitive.name == "dot_general")
    assert product.scope > 0
    assert product.times == 3
    inside = dims.classes(product.eqn.outvars[0], product.scope)
    assert inside == dims.classes(h)


def test_scans_inside_scans_multiply():
    def fun(h, w):
        inner = lambda h, _: (layer(h, w), None)  # noqa: E731
        return lax.scan(lambda h, _: lax.scan(inner, h, None, 5), h, None, 3)[0]

    dims, (h, w), (out,) = named(fun, shape(4, 6), shape(6, 6))
    assert letters(dims, h, w, out) == ["ab", "bb", "ab"]
    assert {u.times for u in dims.uses if u.eqn.primitive.name == "dot_general"} == {15}


def test_a_whiles_two_programs_run_with_its_values():
    def fun(h, w, top):
        def wanted(state):
            return (state[0] < 3) & (state[1].sum() < top[0])

        return lax.while_loop(wanted, lambda s: (s[0] + 1, layer(s[1], w)), (0, h))[1]

    dims, (h, w, _), (out,) = named(fun, shape(4, 6), shape(6, 6), shape(2))
    assert letters(dims, h, w, out) == ["ab", "bb", "ab"]
    summed = next(use for use in dims.uses if use.eqn.primitive.name == "reduce_sum")
    assert dims.classes(summed.eqn.invars[0], summed.scope) == dims.classes(h)


def test_branches_run_with_operands_and_results():
    def fun(p, x, w):
        return lax.cond(p, lambda x, w: x @ w, lambda x, w: w[:1] + x[:, :1], x, w)

    flag = jax.ShapeDtypeStruct((), bool)
    dims, (_, x, w), (out,) = named(fun, flag, shape(4, 6), shape(6, 6))
    assert letters(dims, x, w, out) == ["ab", "bc", "ac"]


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.custom_jvp, jax.custom_vjp])
def test_calls_are_part_of_the_program(wrap):
    def product(x, w):
        return x @ w

    called = wrap(product)
    if wrap is jax.custom_jvp:
        called.defjvp(lambda primals, tangents: (product(*primals), product(*tangents)))
    if wrap is jax.custom_vjp:
        called.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: saved)
    closed = make_jaxpr(lambda x, w: called(x, w) * 2, shape(4, 6), shape(6, 8))
    dims = NamedDims(closed.eqns)
    assert letters(dims, *closed.invars, *closed.outvars) == ["ab", "bc", "ac"]


def test_one_function_called_twice_joins_nothing_by_that():
    called = jax.jit(layer)

    def fun(x, v, y, w):
        return called(x, v), called(y, w)

    closed = make_jaxpr(fun, shape(4, 6), shape(6, 8), shape(4, 6), shape(6, 8))
    dims = NamedDims(closed.eqns)
    assert letters(dims, *closed.invars) == ["ab", "bc", "de", "ef"]


def test_an_unknown_primitive_joins_nothing():
    dims, (x,), (out,) = named(lambda x: jnp.linalg.inv(x @ x.T) @ x, shape(4, 6))
    assert any(use.factors is None for use in dims.uses)
    assert dims.classes(x)[0] not in dims.classes(out)


def test_values_can_be_linked_from_outside():
    dims, (x, y), _ = named(lambda x, y: (x * 2, y * 3), shape(4, 6), shape(4, 6))
    assert dims.classes(x) != dims.classes(y)
    dims.link(x, y)
    assert dims.classes(x) == dims.classes(y)


def test_a_sharding_follows_the_classes():
    dims, (x, w), (y,) = named(lambda x, w: x @ w, shape(4, 6), shape(6, 9))
    cut = Sharding(dims, {"data": 2, "model": 3})
    cut.seed(x, ("data", "model"))
    assert cut.spec(w) == ("model", None)
    assert cut.spec(y) == ("data", None)
    cut.seed(w, (None, ("data", "model")))
    assert cut.spec(y) == ("data", "model")  # data is taken, and 9 is no multiple of 2
    assert parts(cut.spec(x), cut.sizes) == 6


def test_a_spec_has_each_axis_once_and_only_where_it_divides():
    dims, (w, x), (y,) = named(lambda w, x: (x @ w) @ w, shape(6, 6), shape(5, 6))
    cut = Sharding(dims, {"data": 5, "model": 4})
    cut.seed(x, ("data", "model"))
    assert cut.spec(x) == ("data", None)  # 6 is no multiple of 4
    cut = Sharding(dims, {"data": 5, "model": 3})
    cut.seed(x, (None, "model"))
    assert cut.spec(w) == ("model", None)
    assert cut.spec(y) == (None, "model")
    alone = Sharding(dims, {"data": 1, "model": 1})
    alone.seed(x, ("data", "model"))
    assert alone.spec(x) == (None, None)


def test_the_seed_that_says_more_counts():
    dims, (x,), _ = named(lambda x: x * 2, shape(8))
    cut = Sharding(dims, {"data": 2, "model": 2})
    for spec in (("model",), (("model", "data"),), ("data",)):
        cut.seed(x, spec)
    assert cut.spec(x) == (("model", "data"),)


def test_words_for_axes():
    assert axes(None) == ()
    assert axes("data") == ("data",)
    assert axes(("data", "rows")) == ("data", "rows")
    spec = (("model", "data", "rows"), "data", None, ("rows", "model"))
    assert without(spec, "data") == (("model", "rows"), None, None, ("rows", "model"))
    assert without(spec, "data", "rows") == ("model", None, None, "model")
