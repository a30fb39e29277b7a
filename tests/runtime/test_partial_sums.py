"""A gradient of several parts: each device adds its own, which are summed once, to the same."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from launcher.partition.named_dims import NamedDims, Sharding
from launcher.runtime.programs.partial_sums import emitted_locally
from launcher.trace.ir.jaxpr import jaxpr_as_fun, make_jaxpr

DEVICES, ROWS, WIDTH, COLUMNS = 4, 8, 16, 12
FORMS = {  # what is made of a product, and how that is cut where the weight's columns are
    "product": (lambda y: y, (None, "model")),
    "transposed": (jnp.transpose, ("model", None)),
    "heads": (lambda y: y.reshape(ROWS, DEVICES, -1), (None, "model", None)),
}


def gradient_of(count, form):
    """The gradient of an input that `count` weights read, and its arguments."""

    def fun(x, weights, cotangents):
        return jax.vjp(lambda x: [form(x @ w) for w in weights], x)[1](cotangents)[0]

    rng = np.random.default_rng(count)
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    weights = [rng.normal(size=(WIDTH, COLUMNS)).astype(np.float32) for _ in range(count)]
    made = [np.asarray(form(x @ w)) for w in weights]
    return fun, (x, weights, [rng.normal(size=y.shape).astype(np.float32) for y in made])


def compiled(fun, args, spec, locally):
    """The program for several devices, the weights' columns cut over them, and its arguments."""
    closed = make_jaxpr(fun, *args)
    count = len(args[1])
    specs = [(None, None), *[(None, "model")] * count, *[spec] * count]
    sharding = Sharding(NamedDims(closed.eqns), {"model": DEVICES})
    for var, one in zip(closed.invars, specs, strict=True):
        sharding.seed(var, one)
    if locally:
        closed = emitted_locally(closed, sharding, 1)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), ("model",))
    placed = [
        jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*one)))
        for leaf, one in zip(jax.tree.leaves(args), specs, strict=True)
    ]
    whole = NamedSharding(mesh, PartitionSpec())
    call = jax.jit(jaxpr_as_fun(closed), out_shardings=[whole])
    return call.lower(*placed).compile(), placed


def summed(program):
    """How many numbers go into all-reduces."""
    found = re.findall(r"= (.*?) all-reduce(?:-start)?\(", program.as_text())
    shapes = [shape for kinds in found for shape in re.findall(r"f32\[([\d,]*)\]", kinds)]
    return sum(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_gradient_of_several_parts_is_summed_once(count, form):
    make, spec = FORMS[form]
    fun, args = gradient_of(count, make)
    program, placed = compiled(fun, args, spec, locally=True)
    np.testing.assert_allclose(program(*placed)[0], fun(*args), rtol=1e-4, atol=1e-5)
    assert summed(program) == ROWS * WIDTH


def test_without_it_each_part_is_summed():
    """Else all this is no longer needed."""
    program, _ = compiled(*gradient_of(3, FORMS["product"][0]), FORMS["product"][1], locally=False)
    assert summed(program) == 3 * ROWS * WIDTH


@pytest.mark.parametrize(("locally", "gathers"), [(True, 0), (False, 1)])
def test_each_replica_finds_the_largest_of_its_own_rows(locally, gathers):
    """XLA's partitioner gathers the rows of all replicas: else none of this is needed."""
    x = np.random.default_rng(0).normal(size=(DEVICES, ROWS, WIDTH)).astype(np.float32)
    closed = make_jaxpr(lambda x: jax.lax.top_k(x, 2), x[0])
    sharding = Sharding(NamedDims(closed.eqns), {"data": DEVICES})
    one = jaxpr_as_fun(emitted_locally(closed, sharding, DEVICES) if locally else closed)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), ("data",))
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    program = jax.jit(jax.vmap(one, spmd_axis_name="data")).lower(placed).compile()
    jax.tree.map(np.testing.assert_array_equal, program(placed), [*jax.lax.top_k(x, 2)])
    assert bool(re.search(r" all-gather\(", program.as_text())) == bool(gathers)
