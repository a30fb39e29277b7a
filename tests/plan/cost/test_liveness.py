"""Values of a program that the compiler stores."""

import jax
import jax.numpy as jnp
import pytest

from launcher.plan.cost.liveness import Liveness
from launcher.trace.ir.jaxpr import make_jaxpr, nbytes

ROWS, WIDTH = 8, 16
ARRAY = ROWS * WIDTH * 4


def twice(x):
    return jnp.sin(x), jnp.cos(x)


@pytest.mark.parametrize(
    ("program", "other", "stored"),
    [
        (lambda x, y: twice(x * y), (ROWS, WIDTH), 2),
        (lambda x, y: twice(x * y), (WIDTH,), 1),
        (lambda x, y: twice(jax.lax.mul(x, y)), (ROWS, 1), 1),
        (lambda x, y: ((x + 1).sum(1), jnp.sin(x + 1)), (WIDTH,), 1),
    ],
    ids=["of two", "of a broadcast", "of a column", "for a sum"],
)
def test_what_is_stored_of_what_is_read_twice(program, other, stored):
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((ROWS, WIDTH), other)]
    jaxpr = make_jaxpr(program, *shapes)
    liveness = Liveness(jaxpr.eqns, jaxpr.outvars)
    held = liveness.held(len(liveness.equations) - 1, lambda v: nbytes(v.aval))
    assert held // ARRAY == stored


def test_what_sums_read_is_stored_at_once_where_equations_run_as_soon_as_they_can():
    def program(*arrays):
        total = 0.0
        for x in arrays:
            total = total + (x * x).sum()
        return total

    jaxpr = make_jaxpr(program, *[jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)] * 3)
    numbers = 8 * 4  # sums, at most so many at once
    for as_soon, arrays in (True, 3), (False, 0):
        liveness = Liveness(jaxpr.eqns, jaxpr.outvars, as_soon=as_soon)
        peak = liveness.peak(lambda v: nbytes(v.aval))
        assert arrays * ARRAY <= peak <= arrays * ARRAY + numbers


@pytest.mark.parametrize(
    ("widths", "needed"),
    [((WIDTH, WIDTH), 0), ((2 * WIDTH, WIDTH), 0), ((WIDTH // 2, WIDTH // 2), 1)],
    ids=["as large", "larger", "smaller"],
)
def test_the_buffer_of_a_later_result_holds_what_fits_into_it(widths, needed):
    """Of two products in turn the first is dead when two results are made."""

    def program(x, w, a, b):
        first = jnp.sin(x @ w)
        second = first @ w
        return second.sum(0) @ a, second.sum(0) @ b

    shapes = (ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, ROWS * widths[0]), (WIDTH, ROWS * widths[1])
    jaxpr = make_jaxpr(program, *[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    liveness = Liveness(jaxpr.eqns, [], jaxpr.outvars)
    found = liveness.peak_beside(jaxpr.outvars, lambda v: nbytes(v.aval))
    assert found >= needed * ARRAY
    assert (found < ARRAY) == (needed == 0)
