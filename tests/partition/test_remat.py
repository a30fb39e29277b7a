"""What is computed again: by words, in groups, and not a second time where the model does it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.base.names import REMAT_NAMES, RematName, parse_remat
from launcher.partition.assignment import PlanError
from launcher.partition.joint_graph import trace_joint
from launcher.partition.partitioned import partition
from launcher.partition.remat import recomputed, segments
from launcher.plan import local_shape
from launcher.plan.plan import Plan
from launcher.trace import trace_step
from launcher.trace.ir.cost import matmul_flops
from launcher.trace.ir.jaxpr import Jaxpr, jaxpr_as_fun

LAYERS, WIDTH, ROWS = 4, 16, 64
DOTS = jax.checkpoint_policies.dots_saveable
PARAMS = [(jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32"),) * 2] * LAYERS
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
PRODUCT = 2.0 * ROWS * WIDTH**2


def block(x, first, second):
    return x + jnp.sin(jnp.sin(x @ first) @ second)


def half(x, first, second):
    """Of the two products, the second is checkpointed."""
    return x + jax.checkpoint(lambda y: jnp.sin(y @ second))(jnp.sin(x @ first))


def looped(x, first, second):
    def turn(x, w):
        return jnp.sin(x @ w), None

    return jax.lax.scan(jax.checkpoint(turn), x, jnp.stack([first, second]))[0]


MODELS = {
    "plain": block,
    "own": jax.checkpoint(block),
    "policy": jax.checkpoint(block, policy=DOTS),
    "half": half,
    "looped": looped,
}


def traced(model):
    def loss(params, x):
        for i, (first, second) in enumerate(params):
            if i:
                launcher.mark_pipeline_boundary()
            x = MODELS[model](x, first, second)
        return (x**2).mean()

    def step(params, x):
        value, grads = launcher.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - g, params, grads), value

    return trace_step(step, (PARAMS, BATCH), batch_argnums=(1,))


def planned(model="plain", remat="none", stages=1):
    step = traced(model)
    method = launcher.ThreeDParallel(1, 1, stages, 2 if stages > 1 else 1, remat=remat)
    return step, method.plan(step, local_shape(stages, 1, "cpu"))


def products(step, plan):
    """The products of a slice in all task programs, and those that are predicted to be repeated.

    They are as many where equal layers are differentiated once, as the planner does it.
    """
    cut = partition(step, plan.assignment)
    run, planned = (
        sum(
            matmul_flops(one.closed.eqns)
            for graph in cut.stages
            for one in cut.programs(graph.index, known)[0].programs.values()
        )
        for known in (None, {})
    )
    assert run == planned
    again = sum(recomputed(g.layers, plan.stages[g.index].remat).matmul_flops for g in cut.stages)
    each = PRODUCT / cut.slicing.num_slices
    return run / each, again / each


# Forward and backward pass of eight products, of which the first needs no gradient of its input.
ONCE = 3 * 2 * LAYERS - 1


@pytest.mark.parametrize(
    ("model", "remat", "again"),
    [
        ("plain", "none", 0),
        ("plain", "full", 8),
        ("plain", "full/2", 8),
        ("plain", "full:1", 2),
        ("plain", "selective", 0),
        ("own", "none", 8),
        ("own", "full", 8),
        ("own", "full/2", 8),
        ("own", "full:1", 8),
        ("own", "selective", 8),
        ("own", "dots_saveable", 8),
        ("policy", "none", 0),
        ("policy", "full", 0),
        ("half", "none", 4),
        ("half", "full", 8),
        ("half", "full:1", 5),
        ("half", "selective", 4),
        ("looped", "none", 8),
        ("looped", "full", 8),
        ("looped", "selective", 8),
        ("plain", "full:1+selective", 2),
        ("half", "full:1+selective", 5),
    ],
)
@pytest.mark.sampled(9)
@pytest.mark.parametrize("stages", [1, 2])
def test_products_run_again_once_and_as_many_as_are_predicted(model, remat, again, stages):
    if model != "own" and remat.startswith("full:1"):  # of each stage
        without = 4 if model == "half" else 0
        again = without + stages * (again - without)
    run, predicted = products(*planned(model, remat, stages))
    assert predicted == again
    # A loop has the gradient of its first input, too.
    assert run == pytest.approx(ONCE + again + (model == "looped"))


@pytest.mark.parametrize(
    ("model", "remat", "distinct"), [("plain", "full:2", 3), ("half", "none", 2)]
)
def test_equal_layers_are_differentiated_once_and_the_program_is_the_same(model, remat, distinct):
    """Computed again or not, of which the last also makes the loss."""
    step, plan = planned(model, remat)
    (graph,) = partition(step, plan.assignment).stages
    loss, known = step.loss(1), {}
    data = [i for i in graph.operands if i not in loss.wrt]
    joints = [
        trace_joint(graph, loss, graph.wrt, data, remat, open_checkpoints=False, known=memo)
        for memo in (None, known)
    ]
    assert len(known) == distinct
    rng = np.random.default_rng(0)
    values = {
        n: jnp.asarray(rng.normal(size=v.aval.shape), "float32")
        for n, v in joints[0].inputs.items()
    }
    results = []
    for joint in joints:
        names, outs = list(joint.inputs), list(joint.outputs)
        run = jaxpr_as_fun(
            Jaxpr(
                [joint.inputs[n] for n in names], joint.equations, [joint.outputs[n] for n in outs]
            )
        )
        results.append(dict(zip(outs, run(*(values[n] for n in names)), strict=True)))
    assert len(joints[0].named("grad")) == 2 * LAYERS
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, rtol=1e-6, err_msg=str(name))


def test_the_other_layers_have_a_policy_of_their_own():
    step, plan = planned()
    (graph,) = partition(step, plan.assignment).stages
    keep_products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    cut = segments(graph.layers, "full:1+selective")
    nothing = jax.checkpoint_policies.nothing_saveable
    assert [one.policy for one in cut] == [nothing, *[keep_products] * (LAYERS - 1)]


def test_a_layer_is_cut_at_the_models_own_checkpoints():
    step, plan = planned("half")
    (graph,) = partition(step, plan.assignment).stages
    assert [one.policy is None for one in segments(graph.layers, "none")] == [True]
    cut = segments(graph.layers, "full/2")
    assert [e for one in cut for e in one.equations] == list(graph.equations)
    # Before, between and after the checkpoints of two layers.
    assert [one.policy is None for one in cut] == [False, True, False, True, False] * 2


@pytest.mark.parametrize(
    ("model", "remat", "words"),
    [
        ("own", "full", "remat=full saves nothing in stages 0, 1: the model checkpoints each"),
        ("plain", "everything_saveable", "saves nothing in stages 0, 1: it keeps all that is"),
        # The first stage's inputs wait for the second stage; the second goes back at once.
        ("plain", "full/2", "remat=full/2 saves nothing in stage 1: its backward pass follows at"),
    ],
)
def test_what_saves_nothing_is_said(model, remat, words):
    _, plan = planned(model, remat, stages=2)
    assert sum(words in note for note in plan.notes) == 1


@pytest.mark.parametrize(
    ("model", "remat"), [("plain", "full"), ("plain", "full:2"), ("half", "full"), ("own", "none")]
)
def test_what_saves_something_is_not_mentioned(model, remat):
    assert not any("saves nothing" in note for note in planned(model, remat)[1].notes)


def test_a_plan_counts_the_models_own():
    for model, own in (("plain", 0), ("own", LAYERS), ("policy", LAYERS), ("half", 0)):
        (stage,) = planned(model)[1].stages
        assert stage.own_checkpoints == own
    own, full = planned("own")[1].stages[0], planned("plain", "full")[1].stages[0]
    assert own.memory_bytes == pytest.approx(full.memory_bytes, rel=0.1)
    assert own.backward_seconds == pytest.approx(full.backward_seconds, rel=0.05)


@pytest.mark.parametrize("remat", ["full/2", "selective:1", "full:1+selective"])
def test_a_plan_is_replayed_as_it_was(remat):
    step, plan = planned(remat=remat)
    again = Plan.from_dict(plan.to_dict())
    again.validate(step)
    assert again.stages[0].remat == remat
    assert products(step, again) == products(step, plan)


def test_words():
    assert {parse_remat(word) for word in REMAT_NAMES} == {RematName(word) for word in REMAT_NAMES}
    assert parse_remat("full/4") == RematName("full", every=4)
    assert parse_remat("selective:3") == RematName("selective", first=3)
    assert parse_remat("full:3+selective") == RematName("full", first=3, rest="selective")


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize(
    ("remat", "words"),
    [
        ("fulll", "parallel.remat=fulll is not one of none, full, .*did you mean full?"),
        ("ful/2", "parallel.remat=ful/2 is not one of .*full/2 .*; did you mean full?"),
        ("full/", "parallel.remat=full/ is not one of"),
        ("full/2:3", "parallel.remat=full/2:3 is not one of"),
        ("full/1", "parallel.remat=full/1 groups no layers; give full (each by itself)"),
        ("full:0", "parallel.remat=full:0 recomputes no layer; give none, or full:1 and more"),
        ("none/2", "parallel.remat=none/2 recomputes nothing; give none, or full/2"),
        (
            "full/5",
            "parallel.remat=full/5 asks for 5 layers .*; give at most full/4",
        ),
        (
            "full:9",
            "parallel.remat=full:9 asks for 9 layers .*; give at most full:4",
        ),
        ("full:0+selective", "parallel.remat=full:0+selective recomputes no layer; give selective"),
        ("full/2+selective", "parallel.remat=full/2+selective is not one of .*full:2+selective"),
        ("full:2+some", "parallel.remat=full:2+some is not one of"),
        ("full:4+selective", "asks for 5 layers .*; give at most full:3+selective"),
    ],
)
def test_what_cannot_be_is_named(remat, words):
    with pytest.raises(PlanError, match=re.escape(words).replace(r"\.\*", ".*")):
        planned(remat=remat)


def test_a_plan_that_was_edited_is_checked():
    step, plan = planned()
    stage = dataclasses.replace(plan.stages[0], remat="full/1")
    with pytest.raises(PlanError, match="stage 0: remat full/1 groups no layers"):
        dataclasses.replace(plan, stages=(stage,)).validate(step)
