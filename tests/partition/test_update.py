"""Where the parameter update runs, and what it sends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import launcher
from launcher.partition.assignment import Slicing
from launcher.partition.stages import cut_stages
from launcher.partition.update import place_update
from launcher.plan import local_shape
from launcher.plan.methods import PipeshardParallel, UniformStageOption
from launcher.trace import trace_step
from launcher.trace.ir.jaxpr import Jaxpr, jaxpr_as_fun

WIDTH, LAYERS = 16, 4
NUMBER = 4  # bytes of a float32
SLICES = 2


@functools.cache
def traced_step(optimizer, tied=False):
    """The step of a stack of dense layers, its state in shapes."""

    def loss(params, x):
        for i in range(LAYERS):
            if i:
                launcher.mark_pipeline_boundary()
            x = jnp.tanh(x @ params["tied" if tied and i in (0, 3) else f"layer_{i}"])
        return (x**2).mean()

    def train(state, x):
        params, opt = state
        value, grads = launcher.value_and_grad(loss)(params, x)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    names = ["tied", "layer_1", "layer_2"] if tied else [f"layer_{i}" for i in range(LAYERS)]
    params = dict.fromkeys(names, w)
    state = params, jax.eval_shape(optimizer.init, params)
    return state, trace_step(train, (state, jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)))


@functools.cache
def placed(optimizer, *, tied=False, stages=4):
    """The step's plan, its placed outer program, and where its state lives."""
    state, traced = traced_step(optimizer, tied)
    method = PipeshardParallel(SLICES, stage_option=UniformStageOption(stages))
    plan = method.plan(traced, local_shape(stages, 1, "cpu"))
    outer = place(traced, [stage.layers for stage in plan.stages])
    homes = jax.tree.unflatten(
        jax.tree.structure(state), [outer.homes[v] for v in traced.invars[:-1]]
    )
    return plan, outer, homes


def place(traced, layers):
    loss = traced.loss(SLICES)
    return place_update(traced, loss, cut_stages(loss, layers), Slicing(SLICES, 1))


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-3, 10)),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "finite": optax.apply_if_finite(optax.adamw(1e-3), 3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_lives_with_its_parameter(name):
    plan, _, (params, opt) = placed(OPTIMIZERS[name])
    assert params == {f"layer_{i}": i for i in range(LAYERS)}
    for leaf in jax.tree.leaves(opt, is_leaf=lambda x: isinstance(x, dict)):
        if isinstance(leaf, dict):  # a moment: a tree like the parameters
            assert leaf == params
    assert sum(stage.num_parameters for stage in plan.stages) == plan.num_parameters


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_numbers_are_sent_for_the_update(name):
    plan, outer, _ = placed(OPTIMIZERS[name])
    sent = [v for segment in outer.after for v, _ in segment.sends]
    sent += [v for v, _, _ in (*outer.argument_sends, *outer.part_sends)]
    assert all(v.aval.size == 1 for v in sent)
    assert all(t.bytes_per_step < 64 for t in plan.transfers)


@pytest.mark.parametrize(("name", "segments"), [("sgd", 1), ("adamw", 1), ("clipped", 2)])
def test_a_stage_updates_in_as_few_programs_as_the_data_allows(name, segments):
    _, outer, _ = placed(OPTIMIZERS[name])
    count = [sum(s.mesh == i for s in outer.after) for i in range(LAYERS)]
    assert max(count) == segments


class Meshes:
    """The values on each mesh, as the placed program has them: none is read where it is not."""

    def __init__(self, count):
        self.on = [{} for _ in range(count)]

    def send(self, v, src, dst):
        self.on[dst][v] = self.on[src][v]

    def run(self, segments):
        for one in segments:
            fun = jaxpr_as_fun(Jaxpr(one.inputs, one.equations, one.outputs))
            values = self.on[one.mesh]
            made = fun(*[values[v] for v in one.inputs])
            values.update(zip(one.outputs, made, strict=True))
            for v, mesh in one.sends:
                self.send(v, one.mesh, mesh)


@pytest.mark.parametrize(
    ("tied", "layers"), [(False, [(0,), (1, 2), (3,)]), (True, [(0,), (1,), (2,), (3,)])]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_placed_update_is_the_serial_one(name, tied, layers):
    """For gradients at random, a part from each stage that reads a parameter."""
    optimizer, rng = OPTIMIZERS[name], np.random.default_rng(0)
    (shapes, _), traced = traced_step(optimizer, tied)
    outer = place(traced, layers)

    def draw(shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = {k: draw(v.shape) for k, v in shapes.items()}
    state = params, optimizer.init(params)
    arguments = dict(zip(traced.invars, [*jax.tree.leaves(state), draw((8, WIDTH))], strict=True))
    meshes = Meshes(len(layers))
    for v, mesh in outer.homes.items():
        meshes.on[mesh][v] = arguments[v]
    for v, mesh in outer.given:
        meshes.on[mesh][v] = {**traced.constants, **arguments}[v]
    for send in outer.argument_sends:
        meshes.send(*send)
    meshes.run(outer.before)

    wrt = traced.loss(SLICES).wrt  # in the parameters' order
    grads = [jnp.zeros(v.shape) for _, v in sorted(params.items())]
    for (operand, stage), (v,) in outer.grad_parts.items():
        meshes.on[stage][v] = part = draw(v.aval.shape)
        grads[wrt.index(operand)] += part
    for (_, stage), (v,) in outer.result_parts.items():
        meshes.on[stage][v] = loss = draw(v.aval.shape)
    for send in outer.part_sends:
        meshes.send(*send)
    meshes.run(outer.after)

    grads = dict(zip(sorted(params), grads, strict=True))
    updates, opt = optimizer.update(grads, state[1], params)
    want = (optax.apply_updates(params, updates), opt), loss / SLICES
    for v, mesh, value in zip(outer.outvars, outer.out_homes, jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(meshes.on[mesh][v], value, rtol=1e-5, atol=1e-7)


def test_a_shared_weight_has_one_home_and_crosses_twice():
    plan, _, (params, (adam, *_)) = placed(optax.adamw(1e-3), tied=True)
    assert params == {"tied": 0, "layer_1": 1, "layer_2": 2}
    assert adam.mu["tied"] == adam.nu["tied"] == 0
    size = WIDTH * WIDTH * NUMBER
    once = {(t.src_stage, t.dst_stage): t.bytes_per_step for t in plan.transfers}
    assert size <= once[0, 3] < size + 64  # the weight
    assert size <= once[3, 0] < size + 64  # its gradient


def test_activations_cross_every_microbatch():
    plan, _, _ = placed(optax.sgd(0.1))
    every = {(t.src_stage, t.dst_stage): t.bytes_per_microbatch for t in plan.transfers}
    size = 4 * WIDTH * NUMBER  # 8 rows in 2 microbatches
    neighbours = {(i, i + 1) for i in range(3)} | {(i + 1, i) for i in range(3)}
    assert {link: bytes_ for link, bytes_ in every.items() if bytes_} == dict.fromkeys(
        neighbours, size
    )
