"""What a task program stores on XLA:GPU."""

import jax
import jax.numpy as jnp
import pytest

from launcher.partition import Name, NamedDims, Sharding, TaskProgram
from launcher.plan.cost.stage_memory import Stored, Summed
from launcher.trace import make_jaxpr


def gradients(x, images):
    """Those of a convolution, of a matrix (cast), of a bias, and later ones; and what goes on."""
    rows = jnp.tanh(x)
    filters = jax.lax.conv(images, images, (1, 1), "VALID")
    matrix = x.T @ rows
    early, bias = (rows.T @ x.astype(jnp.bfloat16)).astype(jnp.float16), rows.sum(0)
    later = jnp.sin(rows @ matrix)
    last = jax.lax.conv(images + later.sum(), images, (1, 1), "VALID")
    return filters, early, bias, later.T @ rows, last, later


ALL = set(range(5))


@pytest.mark.parametrize(
    ("how", "waiting"),
    [
        (Summed(ALL, together=[ALL]), {0, 1, 3, 4}),
        (Summed(ALL), {3, 4}),
    ],
    ids=["for a bucket", "for nothing"],
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


@pytest.mark.parametrize(
    ("together", "order"),
    [([{0, 1}], "rrrrr" + "mmm" + "r"), ([{0}, {1}], "rrrmrmrmr")],
    ids=["the first", "a later one"],
)
def test_a_product_waits_for_other_parts_of_its_gradient_where_that_is_summed_first(
    together, order
):
    """Of weights (0) that are read twice."""

    def back(w, o, x):
        return jax.grad(lambda w, o, x: (jnp.sin(x @ w) @ o @ w).sum(), (0, 1, 2))(w, o, x)

    closed = make_jaxpr(back, *[jax.ShapeDtypeStruct((n, 4), jnp.float32) for n in (4, 4, 8)])
    inputs = tuple(Name("operand", k) for k in range(3))
    outputs = Name("grad", 0), Name("grad", 1), Name("cotangent", (0, 0))
    stored = Stored(
        TaskProgram(closed, (), inputs, outputs), True, Summed({0, 1}, together=together)
    )
    made = [e for e in stored.liveness.equations if e.primitive.name == "dot_general"]
    assert "".join("mr"[e.outvars[0].aval.shape[0] == 8] for e in made) == order


@pytest.mark.parametrize(
    ("width", "parts", "before"),
    [(256, 1, {0, 1}), (256, 2, set()), (1 << 14, 2, {0})],
    ids=["no sum", "short products", "long ones"],
)
def test_products_of_gradients_wait_for_the_sum_along_a_model_axis(width, parts, before):
    """The nearest before it, until they take as long."""

    def back(slope, rows, w):
        first, second, summed = rows.T @ slope, jnp.sin(rows).T @ slope, slope @ w
        return first, second, summed.T @ rows, jnp.tanh(summed)

    shapes = (1 << 12, width), (1 << 12, width), (width, width)
    closed = make_jaxpr(back, *[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    inputs = tuple(Name("operand", k) for k in range(3))
    outputs = *(Name("grad", k) for k in range(3)), Name("cotangent", (0, 0))
    sharding = Sharding(NamedDims(closed.eqns), {"model": parts})
    sharding.seed(closed.invars[0], (None, "model"))
    stored = Stored(TaskProgram(closed, (), inputs, outputs), True, sharding=sharding)
    made = {v: place for place, eqn in enumerate(stored.liveness.equations) for v in eqn.outvars}
    (total,) = (e.invars[0] for e in closed.eqns if e.primitive.name == "tanh")
    assert {i for v, i in stored.gradients.items() if made[v] < made[total]} == before
