"""JAX's programs, read by one module: what they compute, hold and cost."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import launcher
from launcher.trace.ir.cost import matmul_flops, program_flops
from launcher.trace.ir.jaxpr import (
    Jaxpr,
    alternatives,
    bodies,
    inline_calls,
    is_var,
    jaxpr_as_fun,
    make_jaxpr,
    replace_bodies,
    scan_counts,
    total,
)

ROOT = Path(launcher.__file__).parent
FORMS = (
    r"ClosedJaxpr|jax\.extend(?!\.backend)|jax\.make_jaxpr|call_hi_primitive|\bft_in\b|\bnum_(consts|carry)\b"
    r"|\b(cond|body)_nconsts\b|\b(call|fun)_jaxpr\b|\bprevent_cse\b|params\[.(policy|differentiated)"
)
X, W = jnp.linspace(-1.0, 1.0, 8).reshape(4, 2), jnp.ones((3, 2, 2))


def test_no_other_module_knows_the_form_of_a_jaxpr():
    files = [*ROOT.rglob("*.py"), *(ROOT.parent / "recipes").rglob("*.py")]
    knowing = [path for path in files if re.search(FORMS, path.read_text())]
    assert knowing == [ROOT / "trace" / "ir" / "jaxpr.py"]


def scanned(x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) + x.sum(), h), x, W)


def searched(x):
    return jnp.searchsorted(jnp.sort(x[:, 0]), x[:, 1]) * x.sum()


def taken_apart(x):
    mantissa, exponent = jnp.frexp(x)
    return jnp.ldexp(mantissa * x, exponent)


def inside(x):
    return jax.lax.cond(x[0, 0] > 0, taken_apart, lambda x: x, x)


PROGRAMS = (scanned, searched, taken_apart, inside)


@pytest.mark.parametrize("fun", PROGRAMS)
def test_a_program_computes_what_its_function_does(fun):
    jaxpr = inline_calls(make_jaxpr(fun, X))
    assert isinstance(jaxpr, Jaxpr)
    found = jaxpr_as_fun(jaxpr)(X)
    for a, b in zip(found, jax.tree.leaves(fun(X)), strict=True):
        assert jnp.array_equal(a, b)
    assert "call_hi_primitive" not in str(jaxpr)


@pytest.mark.parametrize("fun", [searched, taken_apart, inside])
def test_what_hides_its_program_keeps_its_derivative(fun):
    read = jaxpr_as_fun(inline_calls(make_jaxpr(fun, X)))
    mine = jax.grad(lambda x: read(x)[0].sum())(X)
    assert jnp.array_equal(mine, jax.grad(lambda x: fun(x).sum())(X))


def test_the_counts_of_a_scan():
    (scan,) = (e for e in make_jaxpr(scanned, X).eqns if e.primitive.name == "scan")
    assert scan_counts(scan) == (1, 1)


TABLE = jnp.arange(12.0).reshape(3, 4)


def run_scan(x, w):
    return jax.lax.scan(lambda c, row: (c + row @ w, c * 2), x[0] @ w, x)


def run_while(x, w):
    return jax.lax.while_loop(lambda c: c[0] < w.sum(), lambda c: (c[0] + 1, c[1] * w[0]), (0, x))


def run_cond(x, w):
    return jax.lax.cond(x[0, 0] > 0, lambda x, w: x @ w, lambda x, w: x, x, w)


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda x, t: (2 * x[0], 2 * t[0]))

# (function, primitive, programs, of which one runs, how often each)
CASES = {
    "scan": (run_scan, "scan", 1, 0, 3),
    "while": (run_while, "while", 2, 0, 1),
    "cond": (run_cond, "cond", 2, 2, 1),
    "jit": (lambda x, w: jax.jit(jnp.dot)(x, w), "jit", 1, 1, 1),
    "checkpoint": (lambda x, w: jax.checkpoint(jnp.dot)(x, w), "checkpoint", 1, 1, 1),
    "custom derivative": (lambda x, w: doubled(x), "custom_jvp_call", 1, 1, 1),
    "none": (lambda x, w: x @ w, "dot_general", 0, 0, 1),
}


def equation(case):
    fun, primitive, *_ = CASES[case]
    found = make_jaxpr(fun, TABLE, jnp.eye(4)).eqns
    names = {"checkpoint": ("checkpoint", "remat2"), "jit": ("jit", "pjit")}
    (eqn,) = [e for e in found if e.primitive.name in names.get(primitive, (primitive,))]
    return eqn


@pytest.mark.parametrize("case", CASES)
def test_inputs_and_outputs_are_the_equations(case):
    *_, programs, one_runs, times = CASES[case]
    eqn = equation(case)
    found = bodies(eqn)
    assert len(found) == programs
    assert len(alternatives(eqn)) == one_runs
    for body in found:
        assert body.times == times
        stacked = body.stacked_inputs, body.stacked_outputs
        inside = body.jaxpr.invars, body.jaxpr.outvars
        for pairs, own, few in zip((body.inputs, body.outputs), inside, stacked, strict=True):
            assert {i for i, _ in pairs} <= set(range(len(own)))
            for i, outer in pairs:
                assert outer.aval.shape[1 if i in few else 0 :] == own[i].aval.shape
        assert {i for i, _ in body.inputs} == set(range(len(body.jaxpr.invars)))
    results = {id(v) for body in found for _, v in body.outputs if is_var(v)}
    assert not programs or results >= {id(v) for v in eqn.outvars}


def test_a_loop_counts_each_turn_and_a_conditional_its_largest_branch():
    def size(jaxpr):
        return float(len(jaxpr.eqns))

    scan, cond = equation("scan"), equation("cond")
    assert total(scan, size) == 3 * size(bodies(scan)[0].jaxpr) > 3
    assert total(cond, size) == max(size(body.jaxpr) for body in bodies(cond)) == 1
    assert total(equation("none"), size) is None


@pytest.mark.parametrize(
    ("case", "replaced"), [("scan", 1), ("while", 2), ("cond", 2), ("custom derivative", 0)]
)
def test_bodies_are_replaced_in_their_order(case, replaced):
    eqn, seen = equation(case), []

    def emptied(jaxpr):
        seen.append(jaxpr)
        return dataclasses.replace(jaxpr, eqns=[])

    emptied_bodies = [body.jaxpr.eqns for body in bodies(replace_bodies(eqn, emptied))]
    assert [one.eqns for one in seen] == [body.jaxpr.eqns for body in bodies(eqn)][:replaced]
    assert replaced == 0 or emptied_bodies == [[]] * replaced


def count(fun, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return matmul_flops(inline_calls(make_jaxpr(fun, *args)).eqns)


def conv(x, k):
    return jax.lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.parametrize(
    ("fun", "shapes", "want"),
    [
        (lambda a, b: a @ b, [(8, 16), (16, 32)], 2 * 8 * 16 * 32),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), [(3, 4, 5), (3, 5, 6)], 2 * 3 * 4 * 5 * 6),
        (conv, [(2, 8, 8, 3), (5, 5, 3, 7)], 2 * (2 * 8 * 8 * 7) * (5 * 5 * 3)),
        (
            lambda a, b: jax.lax.scan(lambda c, _: (c @ b, None), a, None, length=10)[0],
            [(4, 4), (4, 4)],
            10 * 2 * 64,
        ),
        (
            lambda a, b: jax.lax.cond(a[0, 0] > 0, lambda: a @ b @ b, lambda: a @ b),
            [(4, 4), (4, 4)],
            2 * 2 * 64,
        ),
        (jax.jit(lambda a, b: jnp.tanh(a @ b)), [(4, 4), (4, 4)], 2 * 64),
    ],
)
def test_matrix_products(fun, shapes, want):
    assert count(fun, *shapes) == want


def test_other_equations_cost_an_operation_an_element():
    closed = make_jaxpr(lambda x: jnp.tanh(x) + 1, jnp.zeros((3, 5)))
    assert program_flops(closed.eqns) == 2 * 15
