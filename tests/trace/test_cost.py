"""Operation counts against closed forms."""

import jax
import jax.numpy as jnp
import pytest

from launcher.trace.ir.cost import matmul_flops, program_flops
from launcher.trace.ir.jaxpr import inline_calls, make_jaxpr


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
