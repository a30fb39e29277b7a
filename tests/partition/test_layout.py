"""How a plan's specs lay every value of a step out, and what a stage's own specs are."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import launcher
from launcher.partition.layout import gradients, layouts, mesh_sizes, outer_dims
from launcher.plan import local_shape
from launcher.plan.methods import (
    DataParallel,
    ManualStageOption,
    PipeshardParallel,
    ShardParallel,
    ThreeDParallel,
    Zero2Parallel,
    Zero3Parallel,
)
from launcher.trace import trace_step
from launcher.trace.interface import leaf_names
from launcher.trace.ir.jaxpr import is_var

WIDTH, ROWS = 8, 24
OPTIMIZER = optax.adam(1e-3)


def step(state, x):
    def loss(params, x):
        h = jnp.tanh(x @ params["a"] + params["bias"])
        launcher.mark_pipeline_boundary()
        return ((h @ params["b"]) ** 2).mean()

    params, opt = state
    grads = launcher.grad(loss)(params, x)
    updates, opt = OPTIMIZER.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt


def shape(*lengths):
    return jax.ShapeDtypeStruct(lengths, jnp.float32)


PARAMS = {"a": shape(WIDTH, 4 * WIDTH), "b": shape(4 * WIDTH, WIDTH), "bias": shape(4 * WIDTH)}
STATE = PARAMS, jax.eval_shape(OPTIMIZER.init, PARAMS)
TRACED = trace_step(step, (STATE, shape(ROWS, WIDTH)))
NAMES = leaf_names(TRACED)


def planned(method, devices=4):
    return method.plan(TRACED, local_shape(devices, 1, "cpu"))


def specs(plan, stage=0):
    """Of the stage's arguments those that are cut, by the last words of their names."""
    found = plan.stages[stage].shardings
    return {name.removeprefix("0."): spec for name, spec in found.items() if any(spec)}


def laid(plan):
    loss = TRACED.loss(plan.num_micro_batches * plan.num_replicas)
    return layouts(TRACED, loss, plan.assignment, outer_dims(TRACED)), loss


def state(spec_a, spec_b, spec_bias, moments=None):
    words = {"a": spec_a, "b": spec_b, "bias": spec_bias}
    kept = words if moments is None else moments
    found = {f"0.{k}": v for k, v in words.items() if v}
    return found | {f"1.0.{m}.{k}": v for m in ("mu", "nu") for k, v in kept.items() if v}


ALONG = {"a": (None, "data"), "b": ("data", None), "bias": ("data",)}
MEGATRON = (None, "model"), ("model", None), ("model",)
BATCH = {"1": ("data", None)}


@pytest.mark.parametrize(
    ("method", "want"),
    [
        (DataParallel(), BATCH),
        (Zero2Parallel(), BATCH | state(None, None, None, ALONG)),
        (Zero3Parallel(), BATCH | state(*ALONG.values())),
        (ShardParallel(), state(*MEGATRON)),
        (ShardParallel(logical_mesh_shape=(2, 2)), BATCH | state(*MEGATRON)),
    ],
    ids=["data", "zero2", "zero3", "shard", "shard 2x2"],
)
def test_what_a_method_cuts(method, want):
    assert specs(planned(method)) == want


def test_zero_beside_a_model_axis_cuts_what_is_left():
    option = ManualStageOption(
        [[0, 1]], [(1, 8)], logical_mesh_shapes=[(4, 2)], sharding_options=["zero3"]
    )
    found = specs(planned(PipeshardParallel(stage_option=option), 8))
    assert found["0.a"] == ("data", "model")
    assert found["0.b"] == ("model", "data")
    assert found["0.bias"] == (("model", "data"),)
    assert found["1.0.mu.a"] == found["0.a"]


def test_a_stage_speaks_of_its_own_arguments_only():
    plan = planned(ThreeDParallel(data=1, model=2, pipeline=2))
    first, second = (specs(plan, s) for s in (0, 1))
    assert first == {k: v for k, v in state(*MEGATRON).items() if not k.endswith("b")}
    assert second == {k: v for k, v in state(*MEGATRON).items() if k.endswith("b")}


def test_one_device_needs_no_specs():
    assert planned(PipeshardParallel(), 2).stages[0].shardings == {}


def test_sizes_of_a_mesh():
    assert mesh_sizes((6, 2), 3) == {"data": 3, "rows": 2, "model": 2}


def test_gradients_and_moments_are_cut_as_what_they_are_of():
    plan = planned(ShardParallel())
    ((layout,), loss) = laid(plan)
    for var, gradient in gradients(TRACED).items():
        assert layout.outer(gradient) == layout.outer(var)
    for result, argument in TRACED.aliases.items():
        out = TRACED.outvars[result]
        if is_var(out):
            assert layout.outer(out) == layout.outer(TRACED.invars[argument])
    assert any(layout.activation(v) == (None, "model") for e in loss.equations for v in e.outvars)


@pytest.mark.parametrize(
    ("method", "kept", "read", "gradient", "gathered", "scattered"),
    [
        (DataParallel(), (None, None), (None, None), (None, None), False, False),
        (Zero2Parallel(), (None, None), (None, None), (None, "data"), False, True),
        (Zero3Parallel(), (None, "data"), (None, None), (None, "data"), True, True),
    ],
)
def test_what_a_pass_reads_and_leaves(method, kept, read, gradient, gathered, scattered):
    (layout,), loss = laid(planned(method))
    i = loss.wrt[0]
    assert NAMES[TRACED.invars.index(TRACED.loss_equation.invars[i])] == "0.0.a"
    assert layout.outer(TRACED.loss_equation.invars[i]) == kept
    assert layout.operand(i) == read
    assert layout.gradient(i) == gradient
    assert (layout.is_gathered(i), layout.is_scattered(i)) == (gathered, scattered)


def test_data_means_replicas_and_rows():
    """The stages have one replica in common; the second cuts its slices by three."""
    option = ManualStageOption([[0], [1]], [(1, 1), (1, 3)], sharding_options=[None, None])
    plan = planned(PipeshardParallel(stage_option=option))
    (first, second), loss = laid(plan)
    assert first.sizes == {"data": 1, "rows": 1, "model": 1}
    assert second.sizes == {"data": 1, "rows": 3, "model": 1}
    crossing = next(e.outvars[0] for e in loss.equations if e.primitive.name == "tanh")
    assert second.activation(crossing) == ("rows", None)
    assert first.activation(crossing) == (None, None)


def test_a_plan_may_cut_in_any_way_that_fits():
    plan = planned(ShardParallel())
    given = {"0.0.a": ("model", None), "0.0.bias": (), "1": (None, "model")}
    stages = (dataclasses.replace(plan.stages[0], shardings=given),)
    edited = dataclasses.replace(plan, stages=stages)
    edited.validate(TRACED)
    (layout,), _ = laid(edited)
    var = TRACED.invars[NAMES.index("0.0.a")]
    assert layout.outer(var) == ("model", None)
