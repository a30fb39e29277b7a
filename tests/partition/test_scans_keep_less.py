"""Scans keep no more of an iteration than the same iterations one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.partition.stages import cut_stages
from launcher.partition.task_programs import trace_stage
from launcher.schedule import Kind
from launcher.trace import trace_step
from launcher.trace.ir.cost import matmul_flops
from launcher.trace.ir.jaxpr import make_jaxpr, nbytes, source_line

ROWS, WIDTH, DEPTH = 8, 16, 4
KEY = jax.random.key(1)


def shapes(depth):
    """Of the parameters and of the batch."""
    sizes = {"w": (depth, WIDTH, WIDTH), "b": (depth, WIDTH), "own": (WIDTH, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    return params, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def in_a_row(body, carry, rows, reverse=False):
    """What `lax.scan` computes, each iteration by itself."""
    depth = jax.tree.leaves(rows)[0].shape[0]
    made = [None] * depth
    for i in reversed(range(depth)) if reverse else range(depth):
        carry, made[i] = body(carry, jax.tree.map(lambda x, i=i: x[i], rows))
    return carry, None if made[0] is None else jax.tree.map(lambda *x: jnp.stack(x), *made)


def dense(scan, p, x):
    def layer(x, wb):
        return x + jnp.sin(jax.nn.gelu(x @ wb[0] + wb[1])), None

    return scan(layer, x, (p["w"], p["b"]))[0]


def backwards(scan, p, x):
    return scan(lambda x, w: (jnp.tanh(x @ w) * x, None), x, p["w"], reverse=True)[0]


def recurrent(scan, p, x):
    """Time steps with one weight for all, whose hidden values are read, too."""

    def step(h, x):
        h = jnp.tanh(jax.nn.gelu(h @ p["own"]) + jnp.cos(x))
        return h, h

    last, every = scan(step, jnp.zeros_like(x), jnp.sin(p["b"])[:, None] * x)
    return last + jnp.tanh(every).sum(0)


def dropped(scan, p, x):
    def layer(x, row):
        w, key = row
        mask = jax.random.bernoulli(key, 0.5, x.shape)
        return x + jnp.where(mask, jax.nn.gelu(x @ w) * 2, 0), None

    return scan(layer, x, (p["w"], jax.random.split(KEY, len(p["w"]))))[0]


def normed(scan, p, x):
    def layer(x, w):
        y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return x + jax.nn.silu(y @ w), None

    return scan(layer, x, p["w"])[0]


def across(scan, p, x):
    """Layers that read an activation of the first."""
    memory = x @ p["own"]
    return scan(lambda x, w: (jnp.tanh(x @ w) + jnp.exp(-memory) * x, None), x, p["w"])[0]


def nested(scan, p, x):
    def layer(x, w):
        def step(h, b):
            return jnp.sin(jnp.tanh(h @ w + b)), None

        return x + scan(step, jax.nn.gelu(x), p["b"])[0], None

    return scan(layer, x, p["w"])[0]


def twice(scan, p, x):
    """A scan whose rows are another one's: both are kept, as each pair is cut by itself."""
    h, every = scan(lambda h, w: (jnp.tanh(h @ w), jnp.sin(h)), x, p["w"])
    return scan(lambda h, row: (jax.nn.gelu(h) * row, None), h, every)[0]


def counted(scan, p, x):
    """A carry that is no activation, and a branch."""

    def layer(state, w):
        i, x = state
        y = jax.lax.cond(i % 2 == 0, jnp.tanh, jnp.sin, x @ w)
        return (i + 1, x + jax.nn.gelu(y)), None

    return scan(layer, (0, x), p["w"])[0][1]


MODELS = [dense, backwards, recurrent, dropped, normed, across, nested, twice, counted]


def programs(model, scan, depth=DEPTH, remat="none"):
    """The passes of a step of one stage, and its loss."""

    def loss(p, x):
        return (model(scan, p, x) ** 2).mean()

    traced = trace_step(lambda p, x: launcher.grad(loss)(p, x), shapes(depth)).loss(1)
    (graph,) = cut_stages(traced, [(0,)])
    return trace_stage(graph, traced, remat, {Kind.FORWARD, Kind.BACKWARD}), loss


def left(of):
    names = of.programs[Kind.FORWARD].outputs
    return sum(nbytes(name.of.aval) for name in names if name.kind == "residual")


def flops(of):
    return sum(matmul_flops(one.closed.eqns) for one in of.programs.values())


def a_layer(model, scan):
    return left(programs(model, scan, 2 * DEPTH)[0]) - left(programs(model, scan)[0])


# The hidden values of `recurrent` are carried, and rows that others read: in a scan, two arrays.
@pytest.mark.parametrize("model", [m for m in MODELS if m not in (twice, recurrent)])
def test_a_layer_keeps_no_more_than_one_in_a_row(model):
    """But for a counter, or the first one's input, which is there anyway."""
    assert a_layer(model, jax.lax.scan) <= 1.05 * a_layer(model, in_a_row)


@pytest.mark.parametrize("model", MODELS)
def test_no_product_is_computed_twice(model):
    of, loss = programs(model, jax.lax.scan)
    once = matmul_flops(make_jaxpr(jax.grad(loss), *shapes(DEPTH)).eqns)
    assert flops(of) == once


def test_scans_keep_their_source_lines():
    of, _ = programs(dense, jax.lax.scan)
    scans = [eqn for eqn in of.joint.equations if eqn.primitive.name == "scan"]
    assert [source_line(eqn).split(" ")[-1] for eqn in scans] == ["(dense)", "(dense)"]


@pytest.mark.sampled(2)
@pytest.mark.devices
@pytest.mark.parametrize(
    ("model", "remat"),
    [(m, "none") for m in MODELS] + [(m, "full") for m in (dense, recurrent, nested)],
)
def test_gradients_are_those_of_jax(model, remat):
    of, loss = programs(model, jax.lax.scan, remat=remat)
    chance = np.random.default_rng(0)
    params, x = jax.tree.map(
        lambda v: jnp.asarray(chance.normal(size=v.shape) / 4, v.dtype), shapes(DEPTH)
    )
    by_shape = {value.shape: value for value in (*params.values(), x, jnp.float32(1))}
    env = {name: by_shape[v.aval.shape] for name, v in of.joint.inputs.items()}
    keys = [n for n, v in of.joint.inputs.items() if v.aval.dtype != x.dtype]
    env |= dict.fromkeys(keys, KEY)
    for one in of.programs.values():
        made = jax.jit(one.fun)(*(env[name] for name in one.inputs))
        env.update(zip(one.outputs, made, strict=True))
    expected = jax.jit(jax.grad(loss))(params, x)
    for name in of.joint.named("grad"):
        (gradient,) = (g for g in expected.values() if g.shape == env[name].shape)
        np.testing.assert_allclose(env[name], gradient, rtol=1e-5, atol=1e-6)
