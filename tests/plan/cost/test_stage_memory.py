"""What a task program stores on XLA:GPU."""

import jax
import jax.numpy as jnp
import pytest

from launcher.partition import Name, TaskProgram
from launcher.plan.cost.stage_memory import Stored, Summed
from launcher.trace import make_jaxpr


def gradients(x, images):
    """Those of a convolution, of a matrix, of a bias, and later ones; and what goes on."""
    rows = jnp.tanh(x)
    filters = jax.lax.conv(images, images, (1, 1), "VALID")
    matrix = x.T @ rows
    early, bias = rows.T @ x, rows.sum(0)
    later = jnp.sin(rows @ matrix)
    last = jax.lax.conv(images + later.sum(), images, (1, 1), "VALID")
    return filters, early, bias, later.T @ rows, last, later


ALL = set(range(5))


@pytest.mark.parametrize(
    ("how", "waiting"),
    [
        (Summed(ALL, together=[ALL]), {0, 1, 3, 4}),
        (Summed(ALL, together=[ALL], is_cut=True), {0, 1, 3, 4}),
        (Summed(ALL), {3, 4}),
    ],
    ids=["for a bucket", "for collectives along model", "for nothing"],
)
def test_products_wait_for_the_gradients_that_they_are_summed_with(how, waiting):
    """So do convolutions, and sums of rows never."""
    shapes = (8, 4), (2, 3, 8, 8)
    closed = make_jaxpr(gradients, *[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    inputs = tuple(Name("operand", k) for k in (8, 9))
    outputs = *(Name("grad", k) for k in sorted(ALL)), Name("cotangent", (0, 0))
    stored = Stored(TaskProgram(closed, (), inputs, outputs), True, how)
    made = {v: place for place, eqn in enumerate(stored.liveness.equations) for v in eqn.outvars}
    (sine,) = (made[e.outvars[0]] for e in closed.eqns if e.primitive.name == "sin")
    assert {i for v, i in stored.gradients.items() if made[v] > sine} == waiting
