"""A scan over parameters becomes a layer an iteration, and each stacked array an array a layer."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import launcher
from launcher.testing import assert_allclose
from launcher.trace import trace_step
from launcher.trace.interface import leaf_names
from launcher.trace.ir.jaxpr import jaxpr_as_fun, make_jaxpr
from launcher.trace.open_scans import with_rows_apart

WIDTH, LAYERS, ROWS = 4, 5, 12


def params_of(key=0):
    keys = jax.random.split(jax.random.key(key), 4)
    normal = lambda key, *shape: jax.random.normal(key, shape) / 2  # noqa: E731
    return {
        "embed": normal(keys[0], WIDTH, WIDTH),
        "blocks": {
            "w": normal(keys[1], LAYERS, WIDTH, WIDTH),
            "b": normal(keys[2], LAYERS, WIDTH),
        },
        "head": normal(keys[3], WIDTH, WIDTH),
    }


def plain(block, blocks, h):
    return lax.scan(block, h, blocks)[0]


def block(h, p):
    return h + jnp.tanh(h @ p["w"] + p["b"]), None


def forward(params, x, run=plain):
    return run(block, params["blocks"], jnp.tanh(x @ params["embed"])) @ params["head"]


def loss_of(run=plain):
    return lambda params, x: (forward(params, x, run) ** 2).mean()


def step_of(loss, optimizer):
    def step(state, x):
        params, kept = state
        value, grads = launcher.value_and_grad(loss)(params, x)
        updates, kept = optimizer.update(grads, kept, params)
        return (optax.apply_updates(params, updates), kept), value

    return step


def traced(loss=None, optimizer=None):
    optimizer = optimizer or optax.adamw(1e-2)
    params = params_of()
    state = jax.eval_shape(lambda: (params, optimizer.init(params)))
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return trace_step(step_of(loss or loss_of(), optimizer), (state, batch))


def primitives(equations):
    return {eqn.primitive.name for eqn in equations}


OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "clipped by value": optax.chain(optax.clip(0.5), optax.rmsprop(1e-2)),
    "lion": optax.lion(1e-3),
    "masked": optax.masked(
        optax.adam(1e-2), {"embed": True, "blocks": {"w": True, "b": False}, "head": False}
    ),
    "finite": optax.chain(optax.zero_nans(), optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_layers_parameters_moments_and_update_are_its_own(name):
    step = traced(optimizer=OPTIMIZERS[name])
    opened = step.opened
    assert opened.loss(4).num_layers == LAYERS
    # Nothing of one layer meets that of another, but for single numbers of norms.
    assert not primitives(opened.after) & {"concatenate", "slice", "stack"}
    stacked = [count for count in opened.stacks.in_rows if count]
    assert stacked == [LAYERS] * len(stacked)
    assert len(opened.invars) == len(step.invars) + (LAYERS - 1) * len(stacked)
    whole = [v.aval.shape for v in opened.invars if v.aval.shape[:1] == (LAYERS,)]
    assert whole == []


def test_layers_are_named_by_their_numbers():
    names = leaf_names(traced(optimizer=optax.sgd(0.1)).opened)
    assert [n for n in names if ".w." in n] == [f"0.0.blocks.w.{i}" for i in range(LAYERS)]


def test_an_equation_belongs_to_the_layer_that_needs_it():
    """Parameters in another dtype are converted in their own layers, not in the first."""

    def loss(params, x):
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return (forward(low, x.astype(jnp.bfloat16)).astype(jnp.float32) ** 2).mean()

    opened = traced(loss).opened.loss(4)
    position = {v: i for i, v in enumerate(opened.invars)}
    layers = [
        (position[eqn.invars[0]], layer)
        for eqn, layer in zip(opened.equations, opened.layers, strict=True)
        if eqn.primitive.name == "convert_element_type" and eqn.invars[0] in position
    ]
    of_blocks = sorted(layer for _, layer in layers)
    assert set(of_blocks) == set(range(LAYERS))
    assert of_blocks.count(2) == 2  # its matrix and its vector


def reverse(block, blocks, h):
    return lax.scan(block, h, blocks, reverse=True)[0]


def with_sum(block, blocks, h):
    return lax.scan(block, h, jax.tree.map(lambda p: p * 2, blocks))[0] + blocks["b"].sum(0)


def with_outputs(block, blocks, h):
    def both(h, p):
        h, _ = block(h, p)
        return h, h.mean()

    h, means = lax.scan(both, h, blocks)
    return h * means.sum()


def with_numbers(block, blocks, h):
    def numbered(h, p):
        n, p = p
        return block(h * jnp.float32(n + 1), p)[0], None

    return lax.scan(numbered, h, (jnp.arange(LAYERS), blocks))[0]


def checkpointed(block, blocks, h):
    return lax.scan(jax.checkpoint(block), h, blocks)[0]


def twice(block, blocks, h):
    return plain(block, blocks, plain(block, blocks, h))


RUNS = (plain, reverse, with_sum, with_outputs, with_numbers, checkpointed, twice)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_the_opened_loss_is_the_loss(run):
    step = traced(loss_of(run))
    opened = step.opened
    assert opened.loss(1).num_layers == (2 if run is twice else 1) * LAYERS
    params, x = params_of(3), np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("f")
    eqn = opened.traces.whole
    assert "scan" not in primitives(eqn.params["jaxpr"].eqns)
    flat = [
        leaf
        for p in jax.tree.leaves(params)
        for leaf in (p if p.shape[0] == LAYERS else [p])  # embed and head have WIDTH rows
    ]
    (found, *_) = jaxpr_as_fun(eqn.params["jaxpr"])(*flat, x)
    assert_allclose(found, loss_of(run)(params, x), rtol=1e-6)


def test_scans_that_are_no_layers_stay():
    def over_time(params, x):  # a recurrent network: what is scanned is the batch's
        h = jnp.zeros((x.shape[0], WIDTH))
        h, _ = lax.scan(lambda h, t: (jnp.tanh(h @ params["head"] + t[:, None]), None), h, x.T)
        return (h**2).mean()

    assert traced(over_time).opened.stacks is None

    def numbered_times(params, x):  # with parameters of each time step
        cell = lambda h, p: (jnp.tanh(h + p[0][:, None] * p[1]["b"]), None)  # noqa: E731
        h, _ = lax.scan(cell, x, (x.repeat(2, 1).T[:LAYERS], params["blocks"]))
        return (h**2).mean()

    assert traced(numbered_times).opened.stacks is None

    def shared(params, x):  # the same parameters in each iteration
        x, _ = lax.scan(lambda h, _: (jnp.tanh(h @ params["head"]), None), x, None, length=3)
        return (x**2).mean()

    step = traced(shared)
    assert step.opened is step


def test_marks_say_where_layers_end():
    def marked(block, blocks, h):
        launcher.mark_pipeline_boundary()
        return plain(block, blocks, h)

    step = traced(loss_of(marked))
    assert step.opened is step
    assert step.loss(2).num_layers == 2


def test_an_evaluation_is_opened_alike():
    params, batch = params_of(), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    evaluate = trace_step(launcher.microbatched(loss_of()), (params, batch), donate_argnums=())
    names = [n for n in leaf_names(evaluate.opened) if "blocks" in n]
    expected = [f"0.blocks.{p}.{i}" for p, i in itertools.product("bw", range(LAYERS))]
    assert names == expected


@pytest.mark.devices
def test_a_layer_is_made_without_the_others():
    """Of an `init` that scans, or is element-wise, a row needs its own iterations alone."""

    def init(keys):
        def one(carry, key):
            return carry, jax.random.normal(key, (WIDTH,)) * 2

        return lax.scan(one, 0.0, keys)[1] + 1, jnp.zeros((LAYERS, WIDTH))

    keys = jax.random.split(jax.random.key(0), LAYERS)
    closed = make_jaxpr(init, keys)
    apart = with_rows_apart(closed, (LAYERS, LAYERS))
    rows = jaxpr_as_fun(apart)(keys)
    assert_allclose(rows, [*init(keys)[0], *init(keys)[1]], rtol=1e-6)
    assert "scan" not in primitives(apart.eqns)
    one = jax.jit(lambda keys: jaxpr_as_fun(apart)(keys)[2]).lower(keys).compile()
    text = one.as_text()
    assert f"f32[{LAYERS},{WIDTH}]" not in text
