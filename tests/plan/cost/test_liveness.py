"""Which values of a program the compiler stores."""

import jax
import jax.numpy as jnp
import pytest

from launcher.plan.cost.liveness import Liveness
from launcher.trace.jaxpr import nbytes

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
    jaxpr = jax.make_jaxpr(program)(*shapes).jaxpr
    liveness = Liveness(jaxpr.eqns, jaxpr.outvars)
    held = liveness.held(len(liveness.equations) - 1, lambda v: nbytes(v.aval))
    assert held // ARRAY == stored
