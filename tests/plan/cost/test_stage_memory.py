"""What a task program stores on XLA:GPU."""

import jax
import jax.numpy as jnp
import pytest

from launcher.partition import Name, TaskProgram
from launcher.plan.cost.stage_memory import Stored, Summed
from launcher.trace import make_jaxpr


def gradients(x, images):
    """Those of a convolution, of a matrix, of a bias, and a later matrix; and what goes on."""
    rows = jnp.tanh(x)
    filters = jax.lax.conv(images, images, (1, 1), "VALID")
    matrix = x.T @ rows
    bias = rows.sum(0)
    later = jnp.sin(rows @ matrix)
    return filters, (rows.T @ x).astype(jnp.bfloat16), bias, later.T @ rows, later


@pytest.mark.parametrize(("is_cut", "waiting"), [(False, {1, 3}), (True, {0, 1, 3})])
def test_products_wait_for_the_gradients_that_they_are_summed_with(is_cut, waiting):
    """Convolutions do where activations are summed in the pass, and sums of rows never."""
    shapes = (8, 4), (2, 3, 8, 8)
    closed = make_jaxpr(gradients, *[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    names = (
        tuple(Name("operand", k) for k in (8, 9)),
        (
            *(Name("grad", k) for k in range(4)),
            Name("cotangent", (0, 0)),
        ),
    )
    stored = Stored(
        TaskProgram(closed, (), *names), True, Summed(together=[{0, 1, 2, 3}], is_cut=is_cut)
    )
    made = {v: place for place, eqn in enumerate(stored.liveness.equations) for v in eqn.outvars}
    (sine,) = (made[e.outvars[0]] for e in closed.eqns if e.primitive.name == "sin")
    late = {i for v, i in stored.gradients.items() if made[v] > sine}
    assert late == waiting
