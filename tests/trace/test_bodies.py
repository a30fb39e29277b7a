"""The programs inside an equation: whose inputs and outputs they have, and how often they run."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from launcher.trace.ir.jaxpr import (
    alternatives,
    bodies,
    is_var,
    make_jaxpr,
    replace_bodies,
    total,
)

X = jnp.arange(12.0).reshape(3, 4)


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
    found = make_jaxpr(fun, X, jnp.eye(4)).eqns
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
