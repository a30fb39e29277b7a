"""Trainings by every kind of plan compute what plain `jax.jit` computes on one device.

A few pairs that cover all kinds of plans run by default, a few with a language model are slow, all
of them `stress`.
"""

import itertools
import threading

import jax
import numpy as np
import plans
import pytest
from trainings import RECIPES, assert_same, run, serial, training

import launcher
from launcher.plan import Plan, local_shape, make_forward_plan
from launcher.recipes import build_model
from launcher.runtime import compile_step
from launcher.trace import trace_step

SECONDS = 200  # a plan that takes longer hangs
UNTIED = "shard 2x2, 2", "3d", "2+4, zero3", "1+3"  # it differs at both ends only
SLOW = {
    ("gpt_tied", "3d, zero bubble"),
    ("gpt_tied", "rounds that do not divide"),  # the tied weight is on both meshes
    ("gpt_untied", "2+4, zero3"),
    ("mlp", "1+3, whole"),
    ("mlp", "zero bubble, 1 stage"),
}
FAST = {
    *("data, 2", "zero3, 1", "3d", "1+3", "2+4, zero2", "given", "2+4, zero3", "1 stage", "eager"),
    *("4 stages of two", "zero bubble", "rounds that do not divide", "interleaved, remat"),
}


def prepared(name):
    """A training's step, traced, with `init` and the batches."""
    step, init, batches = training(name)
    shapes = jax.eval_shape(init, jax.random.key(0)), batches[0]
    return trace_step(step, shapes), init, batches


def compiled(traced, plan, init):
    executable = compile_step(traced, plan, jax.devices())
    return executable, executable.create(init, jax.random.key(0))


def by_name(traced, method):
    plan = plans.by_name(traced, method, local_shape(plans.METHODS[method][0], 1, "cpu"))
    plan.validate(traced)
    return plan


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(*pair, marks=[] if pair[0] == "mlp" and pair[1] in FAST else [by_hand])
        for pair in [
            *itertools.product(("mlp", "gpt_tied"), plans.METHODS),
            *itertools.product(("gpt_untied",), UNTIED),
            *itertools.product(("gpt_chunks",), ("3d", "zero3, 1", "2+4, zero3")),
        ]
        for by_hand in [pytest.mark.slow if pair in SLOW else pytest.mark.stress]
    ],
)
def test_a_recipe_by_a_plan(name, method):
    traced, init, batches = prepared(name)
    assert_same(run(*compiled(traced, by_name(traced, method), init), batches), serial(name))


@pytest.mark.parametrize(
    "method", [pytest.param("4 stages", marks=pytest.mark.slow), "rounds that do not divide"]
)
def test_an_evaluation_on_the_train_steps_stages(method):
    traced, init, batches = prepared("mlp")
    executable, state = compiled(traced, by_name(traced, method), init)
    params, model = state["params"], build_model(RECIPES["mlp"], "fp32")

    def evaluate(params, batch):
        return launcher.microbatched(lambda p, b: model.loss(p, b, None)[0])(params, batch)

    shapes = jax.eval_shape(lambda: params), batches[0]
    follower = trace_step(evaluate, shapes, donate_argnums=())
    forward = compile_step(follower, make_forward_plan(follower, executable.plan), jax.devices())
    assert executable.in_shardings[0]["params"] == forward.in_shardings[0]
    want = model.loss(jax.device_get(params), batches[0], None)[0]
    np.testing.assert_allclose(float(forward(params, batches[0])), float(want), rtol=1e-5)
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


@pytest.fixture(scope="module")
def chain():
    return prepared("chain")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[] if s < 3 else [pytest.mark.stress]) for s in range(30)]
)
def test_a_plan_at_random(chain, seed):
    traced, init, batches = chain
    plan = plans.at_random(traced, seed, local_shape(8, 1, "cpu"))
    assert Plan.from_dict(plan.to_dict()) == plan
    plan.validate(traced)
    found = []
    thread = threading.Thread(  # a hang must not keep pytest
        target=lambda: found.append(run(*compiled(traced, plan, init), batches)), daemon=True
    )
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "the plan hangs"
    assert found, "the plan fails, see the thread's traceback"
    assert_same(found[0], serial("chain"))
