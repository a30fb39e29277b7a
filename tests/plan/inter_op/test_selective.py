"""The cost of selective recomputation, by the search's table and by built plans."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import random_problems
from random_problems import equal_stages, in_order

import launcher
from launcher.plan.build import build_plan
from launcher.plan.inter_op.estimate import make_estimate
from launcher.plan.inter_op.layer_construction import make_problem
from launcher.plan.inter_op.layer_table import every_recompute, recompute_of
from launcher.plan.inter_op.problem import Constraints
from launcher.plan.inter_op.search import find_plans
from launcher.trace import trace_step

ROWS, POSITIONS, WIDTH, HEADS, LAYERS = 8, 256, 64, 4, 4


def block(x, w):
    q, k, v = jnp.moveaxis((x @ w["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ w["out"]
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def dense(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def traced(layer):
    def loss(params, x):
        for i, w in enumerate(params):
            if i:
                launcher.mark_pipeline_boundary()
            x = layer(x, w)
        return (x**2).mean()

    def train(params, x):
        grads = launcher.grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    lengths = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH,) * 2}
    lengths |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = [{name: jax.ShapeDtypeStruct(of, "float32") for name, of in lengths.items()}] * LAYERS
    return trace_step(train, (params, jax.ShapeDtypeStruct((ROWS, POSITIONS, WIDTH), "float32")))


def cluster_of(memory, each=2):
    rates = {"flops": 1e11, "flops_fp32": 1e11, "memory_bandwidth": 1e10}
    links = {"intra_host": 1e9, "inter_host": 1e9, "latency": 1e-6}
    return random_problems.cluster_of(1, each, memory_bytes=memory, **rates, **links)


def assignment_of(shapes, remat):
    remats = (remat,) * len(shapes)
    return equal_stages(in_order(shapes), LAYERS, num_micro_batches=2, remat=remats)


# The search does not know what waits in a GPU's program; it then searches again with less memory.
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "least"), [("cpu", 0.98), ("gpu", 0.6)])
@pytest.mark.parametrize("shapes", [[(1, 1)] * 2, [(1, 2)]], ids=["stages", "model"])
def test_an_estimate_is_the_plans_own_prediction(shapes, kind, least):
    step, cluster = traced(block), dataclasses.replace(cluster_of(2**40), device_kind=kind)
    problem = make_problem(step, cluster)
    for remat in ("selective", "full:1+selective"):
        assignment = assignment_of(shapes, remat)
        plan, estimate = build_plan(step, assignment, cluster), make_estimate(assignment, problem)
        for built, known in zip(plan.stages, estimate.stages, strict=True):
            for name in ("forward_seconds", "backward_seconds", "update_seconds"):
                assert getattr(known, name) == pytest.approx(getattr(built, name), rel=2e-3), name
            # Of both passes as one program it is taken to need more than it does.
            assert least <= known.memory_bytes / built.memory_bytes <= 1.2


def test_what_is_computed_again_selectively_lies_between_the_rest():
    problem = make_problem(traced(block), cluster_of(2**40))
    words = "none", "selective", "full:1+selective", "full"
    every = [make_estimate(assignment_of([(1, 1)] * 2, word), problem) for word in words]
    held = [one.stages[0].memory_bytes for one in every]
    seconds = [one.predicted_step_seconds for one in every]
    assert held == sorted(held, reverse=True)
    assert seconds == sorted(seconds)


def test_the_search_computes_attention_again_and_products_not():
    problem, wanted = make_problem(traced(block), cluster_of(2**40, each=1)), Constraints(2)
    (stage,) = make_estimate(assignment_of([(1, 1)], "selective"), problem).stages
    small = dataclasses.replace(problem, memory_bytes=1.02 * stage.memory_bytes)
    without = dataclasses.replace(small.table, selective=False)
    found, other = (
        find_plans(one, wanted) for one in (small, dataclasses.replace(small, table=without))
    )
    assert found.ranked[0][0].remat == ("selective",)
    assert other.ranked[0][0].remat == ("full",)  # of three layers it would not fit
    assert found.best < other.best
    assert found.least_seconds <= found.best


def test_without_attention_nothing_more_is_traced():
    problem = make_problem(traced(dense), cluster_of(2**40))
    assert not problem.table.selective
    assert not any(of.any() for name, of in problem.table.of.items() if "selective" in name)


@pytest.mark.parametrize("selective", [False, True])
def test_recomputations_and_their_words(selective):
    groups = (0, 1), (2,), (3, 4)
    every = every_recompute(3, selective)
    words = [one.remat(groups) for one in every]
    assert [recompute_of(word, groups, selective) for word in words] == list(every)
    assert words[:4] == ["none", "full:2", "full:3", "full"]
    assert words[4:] == (["full:3+selective", "full:2+selective", "selective"] * selective)
