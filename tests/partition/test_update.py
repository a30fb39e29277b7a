"""Where the parameter update runs, and what it sends."""

import jax
import jax.numpy as jnp
import optax
import pytest

import launcher
from launcher.partition.slicing import Slicing
from launcher.partition.stages import cut_stages
from launcher.partition.update import place_update
from launcher.plan import Plan, PlanError, local_shape
from launcher.plan.methods import PipeshardParallel, UniformStageOption
from launcher.trace import trace_step

WIDTH, LAYERS = 16, 4
NUMBER = 4  # bytes of a float32


def placed(optimizer, *, tied=False, stages=4, init=None, step=None):
    """The traced step, its plan, and the placed outer program of a stack of dense layers."""

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
    traced = trace_step(train, (state, jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)))
    method = PipeshardParallel(2, stage_option=UniformStageOption(stages))
    plan = method.plan(traced, local_shape(stages, 1, "cpu"))
    loss_graph = traced.loss(2)
    graphs = cut_stages(loss_graph, [s.layers for s in plan.stages])
    outer = place_update(traced, loss_graph, graphs, Slicing(2, 1))
    homes = jax.tree.unflatten(
        jax.tree.structure(state), [outer.homes[v] for v in traced.invars[:-1]]
    )
    return plan, outer, homes


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


def test_a_plan_is_data():
    plan, _, _ = placed(optax.sgd(0.1))
    assert Plan.from_dict(plan.to_dict()) == plan
    with pytest.raises(PlanError, match="not a plan of this version"):
        Plan.from_dict({"stages": []})


@pytest.mark.parametrize(
    ("asked", "words"),
    [(5, "5 is more than the model's 4 layers"), (3, "do not divide .*possible here: 1, 2, 4")],
)
def test_impossible_stage_counts(asked, words):
    traced = trace_step(
        lambda w, x: (w, launcher.microbatched(_four_layers)(w, x)),
        (
            jax.ShapeDtypeStruct((4, 4), jnp.float32),
            jax.ShapeDtypeStruct((8, 4), jnp.float32),
        ),
    )
    method = PipeshardParallel(stage_option=UniformStageOption(asked))
    with pytest.raises(PlanError, match=words):
        method.plan(traced, local_shape(4, 1, "cpu"))


def _four_layers(w, x):
    for _ in range(3):
        x = x @ w
        launcher.mark_pipeline_boundary()
    return (x @ w).sum()
