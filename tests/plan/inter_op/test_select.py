"""Selection of a plan by the settings of a search; smaller batches that all devices can share."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from layered import layered_step

import launcher
from launcher.plan import local_shape
from launcher.plan.inter_op.problem import Constraints
from launcher.plan.inter_op.select import search
from launcher.plan.methods import auto_plans
from launcher.trace import trace_step

# Sums are cheap, but not free.
CLUSTER = dataclasses.replace(
    local_shape(4, 1, "cpu"),
    effective_parallelism=None,
    latency=1e-6,
    intra_host=1e11,
    dispatch_overhead=1e-6,
)


def plan_of(rows, cluster=CLUSTER, layers=2, wanted=Constraints()):  # noqa: B008 (frozen)
    """A plan of a network that one device a stage cannot run at the same speed."""

    def loss(params, x):
        for i, w in enumerate(params):
            if i:
                launcher.mark_pipeline_boundary()
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def train(params, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, launcher.grad(loss)(params, x))

    params = [jax.ShapeDtypeStruct((63, 63), jnp.float32)] * layers
    batch = jax.ShapeDtypeStruct((rows, 15, 63), jnp.float32)
    return search(trace_step(train, (params, batch)), cluster, wanted)[0][0]


def noted(plan):
    """The rows, milliseconds and share that a note names, if there is one."""
    (*found,) = (note for note in plan.notes if note.startswith("a global batch"))
    if not found:
        return None
    pattern = r"a global batch of (\d+) instead of (\d+) examples would take (\S+) ms a step "
    pattern += r"\((\d+)% less per example\), since all 4 devices can share it"
    few, many, seconds, share = re.fullmatch(pattern, found[0]).groups()
    return int(few), int(many), float(seconds) / 1e3, int(share) / 100


def test_a_prime_batch_is_told_what_one_row_less_would_save():
    plan, smaller = plan_of(97), plan_of(96)
    few, many, seconds, share = noted(plan)
    assert (few, many) == (96, 97)
    assert seconds == pytest.approx(smaller.predicted_step_seconds, rel=0.05)
    assert seconds >= 0.995 * smaller.predicted_step_seconds  # no more is promised than is there
    assert share == pytest.approx(
        1 - (seconds / 96) / (plan.predicted_step_seconds / 97), abs=0.006
    )
    assert share > 0.1
    assert noted(smaller) is None


def test_nothing_is_said_where_little_would_be_saved():
    one = dataclasses.replace(CLUSTER, hosts=1, devices_per_host=1)
    assert noted(plan_of(97, one)) is None
    assert noted(plan_of(7)) is None  # 4 are far fewer


def test_more_stages_than_groups_of_layers_that_are_searched_by_default():
    step = layered_step([(8, 8)] * 18, 8)
    plan = auto_plans(step, local_shape(18, 1, "cpu"), 2, "1f1b", "none", num_stages=17)[0]
    assert len(plan.stages) == 17


def test_devices_that_share_a_machine_may_idle():
    """A small step is the faster on one of them, which then has all cores; a large one is not."""
    shape = local_shape(4, 1, "cpu")
    small, large = (layered_step([(size, size)] * 4, 128) for size in (512, 2048))
    plan = auto_plans(small, shape, None, "auto", "auto")[0]
    assert plan.num_devices == 1
    assert auto_plans(large, shape, None, "auto", "auto")[0].num_devices == 4
    # On one device it is predicted to be 1.6 % faster, which is less than predictions are good for.
    between = layered_step([(896, 896)] * 4, 128)
    assert auto_plans(between, shape, None, "auto", "auto")[0].num_devices == 4
    every = auto_plans(small, shape, None, "auto", "auto", num_stages=2)[0]
    assert len(every.stages) == 2


def test_products_that_use_all_cores_by_themselves_are_left_to_one_device():
    """A machine whose network uses one of two cores alone, and its products both."""
    step = layered_step([(512, 512)] * 4, 256)
    shape = dataclasses.replace(
        local_shape(4, 1, "cpu"), effective_parallelism=2.0, dispatch_overhead=5e-4, latency=2e-5
    )
    assert auto_plans(step, shape, None, "auto", "auto")[0].num_devices > 1
    apart = dataclasses.replace(shape, product_parallelism=1.0)
    assert auto_plans(step, apart, None, "auto", "auto")[0].num_devices == 1
