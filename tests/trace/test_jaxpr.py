"""JAX's programs are read by one module, whatever JAX's version."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import launcher
from launcher.trace.ir.jaxpr import Jaxpr, inline_calls, jaxpr_as_fun, make_jaxpr, scan_counts

ROOT = Path(launcher.__file__).parent
FORMS = (
    r"ClosedJaxpr|jax\.extend|jax\.make_jaxpr|call_hi_primitive|\bft_in\b|\bnum_(consts|carry)\b"
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
