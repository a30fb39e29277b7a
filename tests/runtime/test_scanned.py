"""Models whose blocks are one scan run as pipelines, and are to their caller what they were."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import scanned
from flax import serialization
from scanned import (
    BATCHES,
    LAYERS,
    evaluate,
    init,
    params_of,
    serial,
    step,
    unrolled_step,
)

import launcher
from launcher import PipeshardParallel, UniformStageOption
from launcher.arrays.stacked_array import StackedArray
from launcher.plan import local_shape
from launcher.testing import assert_allclose
from launcher.trace import trace_step


def stages(count, micro_batches=3, **how):
    return PipeshardParallel(micro_batches, stage_option=UniformStageOption(count), **how)


METHODS = {
    "4 stages": stages(4, 4, schedule="zero_bubble"),
    "5 stages": stages(5, 1),  # of 2 and of 3 layers
    "remat": stages(2, 2, remat="full"),
    "3d": launcher.ThreeDParallel(2, 2, 2, num_micro_batches=2),
    "auto": PipeshardParallel(None, stage_option="auto", schedule="auto", remat="auto"),
    "data": launcher.DataParallel(),
    "zero3": launcher.Zero3Parallel(),
}


@functools.cache
def parallel(count):
    """The step in so many stages, compiled once for all tests."""
    return launcher.parallelize(step, method=stages(count))


def trained(train, state, count, first=0):
    losses = []
    for x in BATCHES[first:count]:
        state, value = train(state, x)
        losses.append(float(value))
    return state, losses


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", METHODS)
def test_training_is_that_of_one_device(name):
    devices = jax.devices()[: 5 if name == "5 stages" else 8]
    train = launcher.parallelize(step, method=METHODS[name], devices=devices)
    state, losses = trained(train, train.create(init, jax.random.key(0), like=BATCHES[0]), 4)
    expected, by_one = serial(4)
    assert_allclose(losses, by_one, rtol=1e-5)
    assert_allclose(state, expected, rtol=1e-4, atol=1e-6)


def test_each_stage_holds_its_own_layers_alone():
    train = parallel(4)
    state = train.create(init, jax.random.key(0), like=BATCHES[0])
    devices = jax.devices()
    weights = state[0]["blocks"]["w"]
    assert isinstance(weights, StackedArray)
    assert weights.shape == (LAYERS, 8, 8)
    for of_stage in train.last_plan.stages:
        for layer in of_stage.layers:
            assert weights[layer].devices() == {devices[i] for i in of_stage.devices}


def test_a_state_of_the_callers_own_is_cut_and_comes_back_in_its_structure():
    train = parallel(2)
    given = jax.jit(init)(jax.random.key(0))
    state, losses = trained(train, given, 2)
    assert jax.tree.structure(state) == jax.tree.structure(given)
    expected, by_one = serial(2)
    assert_allclose(losses, by_one, rtol=1e-5)
    doubled = jax.tree.map(lambda x: 2 * x, state)
    assert_allclose(doubled, jax.tree.map(lambda x: 2 * x, expected), rtol=1e-4, atol=1e-6)
    assert float(jnp.sum(state[0]["blocks"]["w"])) == pytest.approx(
        float(jnp.sum(expected[0]["blocks"]["w"])), rel=1e-4
    )


def test_an_evaluation_finds_the_layers_where_they_are():
    train = parallel(4)
    state, _ = trained(train, train.create(init, jax.random.key(0), like=BATCHES[0]), 1)
    held_out = launcher.parallelize(evaluate, method=train, donate_argnums=())
    expected = jax.jit(evaluate)(serial(1)[0], BATCHES[1])
    for _ in range(2):
        assert float(held_out(state, BATCHES[1])) == pytest.approx(float(expected), rel=1e-5)
    trained(train, state, 2, first=1)


def test_a_step_that_takes_a_stacked_array_whole_gets_it():
    train = parallel(2)
    state, _ = trained(train, train.create(init, jax.random.key(0), like=BATCHES[0]), 1)

    def other(state, x):  # no scan
        return launcher.microbatched(lambda p, x: (x * p["blocks"]["b"].sum()).mean())(state[0], x)

    whole = launcher.parallelize(other, method=launcher.DataParallel(), donate_argnums=())
    found = float(whole(state, BATCHES[0]))
    assert found == pytest.approx(float(jax.jit(other)(serial(1)[0], BATCHES[0])), rel=1e-4)


def test_flax_serializes_a_state():
    train = parallel(2)
    state = train.create(init, jax.random.key(0), like=BATCHES[0])
    found = serialization.from_bytes(state, serialization.to_bytes(state))
    assert_allclose(found, state, rtol=0)


def test_used_up_rows_are_said():
    train = parallel(2)
    state = train.create(init, jax.random.key(0), like=BATCHES[0])
    train(state, BATCHES[0])
    assert state[0]["blocks"]["w"].is_deleted()
    with pytest.raises(ValueError, match=r"\['blocks'\]\['b'\]\[0\] was donated to an earlier"):
        train(state, BATCHES[0])


def test_a_warm_up_and_a_check_of_replicas_change_nothing():
    train = launcher.parallelize(step, method=launcher.ThreeDParallel(4, 1, 2, 2))
    state = train.create(init, jax.random.key(0), like=BATCHES[0])
    train.warmup(state, BATCHES[0])
    launcher.check_replicas(state)
    assert_allclose(state, jax.jit(init)(jax.random.key(0)), rtol=1e-6)


def test_a_checkpoint_is_that_of_one_device_and_of_any_plan(tmp_path):
    train = parallel(4)
    state, _ = trained(train, train.create(init, jax.random.key(0), like=BATCHES[0]), 2)
    launcher.save(tmp_path / "stages", state)
    plain = ocp.PyTreeCheckpointer().restore(tmp_path / "stages" / "default")
    expected = serial(2)[0]
    assert plain["0"]["blocks"]["w"].shape == (LAYERS, 8, 8)
    assert_allclose(plain["0"], expected[0], rtol=1e-4, atol=1e-6)
    launcher.save(tmp_path / "one", expected)
    whole = launcher.parallelize(step, method=launcher.DataParallel())
    for folder, other in (("one", parallel(2)), ("stages", whole)):
        like = other.create(init, jax.random.key(1), like=BATCHES[0])
        found = launcher.restore(tmp_path / folder, like=like)
        assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
        _, losses = trained(other, found, 4, first=2)
        assert_allclose(losses, serial(4)[1][2:], rtol=1e-5)


@pytest.mark.parametrize("count", [2, 4])
def test_the_plan_is_that_of_the_same_model_unrolled(count):
    """Only the names of its parameters differ, and memory is that of the pieces that run."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    batch = jax.ShapeDtypeStruct(BATCHES[0].shape, jnp.float32)
    apart = jax.eval_shape(lambda: unrolled_state(jax.random.key(0)))
    cluster, plans = local_shape(count, 1, "cpu"), []
    for of, state in ((step, shapes), (unrolled_step, apart)):
        plans.append(stages(count).plan(trace_step(of, (state, batch)), cluster))
    a, b = plans
    assert [s.layers for s in a.stages] == [s.layers for s in b.stages]
    memory = [s.memory_bytes for s in b.stages]
    assert [s.memory_bytes for s in a.stages] == pytest.approx(memory, rel=0.05)
    assert a.predicted_step_seconds == pytest.approx(b.predicted_step_seconds, rel=0.02)
    assert a.num_parameters == b.num_parameters


def unrolled_state(key):
    params = params_of(key)
    layers = [jax.tree.map(lambda p, i=i: p[i], params["blocks"]) for i in range(LAYERS)]
    params = {**params, "blocks": layers}
    return params, scanned.OPTIMIZER.init(params)


@pytest.mark.slow
def test_workers_keep_rows_and_hand_them_out():
    launcher.init("ray", num_nodes=2, num_devices_per_node=2)
    try:
        train = launcher.parallelize(step, method=stages(4))
        state, losses = trained(train, train.create(init, jax.random.key(0), like=BATCHES[0]), 3)
        expected, by_one = serial(3)
        assert_allclose(losses, by_one, rtol=1e-5)
        assert_allclose(state, expected, rtol=1e-4, atol=1e-6)
        weights = state[0]["blocks"]["w"]
        assert weights.shape == (LAYERS, 8, 8)
        assert weights.placement.startswith("rows 0 to 2: whole, on device 0; rows 3 to 5: ")
        held_out = launcher.parallelize(evaluate, method=train, donate_argnums=())
        found = float(held_out(state, BATCHES[3]))
        assert found == pytest.approx(float(jax.jit(evaluate)(expected, BATCHES[3])), rel=1e-5)
        launcher.check_replicas(state)
        state, losses = trained(train, state, 4, first=3)
        assert_allclose(losses, serial(4)[1][3:], rtol=1e-5)
    finally:
        launcher.shutdown()


def test_a_stacked_array_is_an_array():
    value = np.arange(24.0, dtype=np.float32).reshape(4, 3, 2)
    rows = [jax.device_put(row, device) for row, device in zip(value, jax.devices(), strict=False)]
    array = StackedArray(rows)
    assert (array.shape, array.ndim, array.size, array.nbytes) == ((4, 3, 2), 3, 24, 96)
    assert array.dtype == jnp.float32
    assert len(array) == 4
    assert array[2] is rows[2]
    assert array.devices() == set(jax.devices()[:4])
    with pytest.raises(AttributeError, match=r"lie apart: \.where\.rows has the sharding of each"):
        _ = array.sharding
    for found in (array, array + 0, array[:], jnp.asarray(array), jax.device_get(array)):
        np.testing.assert_array_equal(np.asarray(found), value)
    assert float(jax.jit(jnp.sum)(array)) == value.sum()
    np.testing.assert_array_equal(np.asarray(array.T), value.T)
    np.testing.assert_array_equal(np.asarray(array[1:, 0]), value[1:, 0])
