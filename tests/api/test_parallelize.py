"""The public Python front: a step is parallelized, created in place, run, evaluated, replayed."""

import dataclasses
import functools
import inspect
import json
import re
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import BATCHES, evaluate, init, run, serial, step

import launcher
from launcher.api import session
from launcher.api.ray_backend import planned_shape
from launcher.api.session import SessionError
from launcher.base import measurements, output
from launcher.cluster.devices import DevicePool
from launcher.cluster.errors import ClusterError
from launcher.cluster.kinds import pool_shape
from launcher.plan import PlanError, local_shape
from launcher.trace import TraceError


def test_decorator_replay_and_evaluation():
    method = launcher.PipeshardParallel(
        num_micro_batches=2, stage_option=launcher.UniformStageOption(2)
    )
    train = launcher.parallelize(method=method, devices=jax.devices()[:2])(step)
    assert train.__name__ == "step"
    state, losses = run(train, 2)
    planned = train.plan(state, BATCHES[0])
    ran = dataclasses.replace(planned, workers=(launcher.WorkerInfo(0, "::1", 7, (0, 1)),))
    plan = launcher.Plan.from_dict(json.loads(json.dumps(ran.to_dict())))
    assert plan == ran
    again = launcher.parallelize(step, method=launcher.Replay(plan), devices=jax.devices())
    assert jax.device_get(run(again, 2)[1]) == jax.device_get(losses)
    assert again.last_plan == planned  # on workers of its own

    follow = launcher.parallelize(evaluate, method=launcher.Follow(plan), donate_argnums=())
    want = evaluate(jax.device_get(state), BATCHES[0])
    np.testing.assert_allclose(float(follow(state, BATCHES[0])), float(want), rtol=1e-5)


def test_a_plan_needs_shapes_alone():
    train = launcher.parallelize(
        step, method=launcher.PipeshardParallel(stage_option=launcher.UniformStageOption(4))
    )
    shapes = jax.eval_shape(init, jax.random.key(0)), jax.eval_shape(lambda: BATCHES[0])
    assert len(train.plan(*shapes).stages) == 4


def test_new_shapes_compile_again_and_say_so_once():
    train = launcher.parallelize(step, devices=jax.devices()[:1])
    state, _ = run(train, 1)
    again = r"step is compiled again: x is float32\[12,8\], was float32\[24,8\]"
    with pytest.warns(UserWarning, match=again) as told:
        state, _ = train(state, BATCHES[0][:12])
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = train(state, BATCHES[0])
        train(state, BATCHES[0][:12])


def test_a_numpy_float64_is_what_jax_makes_of_it():
    train = launcher.parallelize(step, devices=jax.devices()[:1])
    state, _ = run(train, 1)
    executable = train.executable(state, BATCHES[1])
    assert train.executable(state, BATCHES[1].astype(np.float64)) is executable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(state, BATCHES[1].astype(np.float64))


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_no_array_is_named_by_its_path(whole):
    train = launcher.parallelize(step)
    args = (({"w": np.ones(3)}, "adam"), BATCHES[0])
    with pytest.raises(TraceError, match=r"state\[1\] of step is a str"):
        train(*args) if whole else train.plan(*args)
    with pytest.raises(TraceError, match=r"x of step is a ndarray of <U4, which JAX cannot take"):
        train.plan(np.ones(3), np.array(["adam"]))


def test_argument_numbers_that_there_are_not_are_refused():
    train = launcher.parallelize(step, batch_argnums=(1, 2))
    with pytest.raises(TraceError, match=r"batch_argnums=\(1, 2\) of step, which was given 2"):
        train.plan(jax.eval_shape(init, jax.random.key(0)), BATCHES[0])


def test_static_arguments_are_python_values():
    def scaled(scale, state, batch, words=("mean",)):
        assert (type(scale), words) in [(float, ("mean",)), (int, ("mean",)), (int, ("sum",))]
        state, loss = step(state, batch)
        return state, loss * scale

    train = launcher.parallelize(
        scaled,
        donate_argnums=1,
        batch_argnums=2,
        static_argnums=(0, 3),
        devices=jax.devices()[:2],
    )
    state, expected = init(jax.random.key(0)), serial(3)[1]
    with warnings.catch_warnings():  # a new static value is asked for, and no surprise
        warnings.simplefilter("error")
        state, first = train(2.0, state, BATCHES[0])
        state, second = train(2, state, BATCHES[1])
        _, third = train(3, state, batch=BATCHES[2], words=("sum",))
    launcher.testing.assert_allclose(
        [first, second, third], [2 * expected[0], 2 * expected[1], 3 * expected[2]]
    )
    with pytest.raises(TraceError, match=r"static argument 3 of scaled is a list.*unhashable"):
        train(2, state, BATCHES[0], ["mean"])
    with pytest.raises(TraceError, match=r"batch_argnums=\(1,\)"):
        launcher.parallelize(scaled, static_argnums=1)


def test_an_evaluation_follows_the_train_step_it_is_given():
    train = launcher.parallelize(
        step,
        method=launcher.PipeshardParallel(stage_option=launcher.UniformStageOption(2)),
        devices=jax.devices()[:2],
    )
    follow = launcher.parallelize(evaluate, method=train, donate_argnums=())
    with pytest.raises(PlanError, match="step has no plan to follow yet"):
        follow(init(jax.random.key(0)), BATCHES[0])
    state, _ = run(train, 1)
    assert [s.devices for s in follow.plan(state, BATCHES[0]).stages] == [(0,), (1,)]
    expected = jax.jit(evaluate)(jax.device_get(state), BATCHES[0])
    launcher.testing.assert_allclose(follow(state, BATCHES[0]), expected)


@pytest.mark.parametrize("method", [launcher.Zero2Parallel(), launcher.ThreeDParallel(2, 1, 2)])
def test_a_warm_up_compiles_runs_and_changes_nothing(method):
    train = launcher.parallelize(step, method=method, devices=jax.devices()[:4])
    state = train.create(init, jax.random.key(0), like=BATCHES[0])
    before = jax.device_get(state)
    train.warmup(state, x=BATCHES[0])
    launcher.testing.assert_allclose(state, before, rtol=0, atol=0)
    losses = []
    for batch in BATCHES[:2]:
        state, loss = train(state, batch)
        losses.append(float(loss))
    np.testing.assert_allclose(losses, serial(2)[1], rtol=1e-5)


def test_a_parallelized_function_looks_like_the_function():
    @launcher.parallelize
    def plain(state, batch):
        """One step."""
        return step(state, batch)

    @launcher.parallelize(devices=jax.devices()[:1])
    def with_options(state, batch):
        return step(state, batch)

    assert (plain.__name__, plain.__doc__) == ("plain", "One step.")
    assert list(inspect.signature(plain).parameters) == ["state", "batch"]
    launcher.testing.assert_allclose(run(with_options, 1)[1], serial(1)[1])


def test_local_sessions_choose_devices_and_repeat():
    train = launcher.parallelize(step, method=launcher.DataParallel())
    shapes = jax.eval_shape(init, jax.random.key(0)), BATCHES[0]
    for count in (2, 1):
        launcher.init("local", num_devices_per_node=count)
        assert train.plan(*shapes).num_devices == count
        with pytest.raises(SessionError, match=r"call launcher\.shutdown"):
            launcher.init("local")
        launcher.shutdown()
    assert train.plan(*shapes).num_devices == 8
    launcher.shutdown()


def test_plans_rest_on_what_task_calibrate_measured(tmp_path, monkeypatch):
    """On this process's devices and on workers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {
        "product_flops": {"bfloat16": {"128": 4e9}, "float32": {"128": 2e9}},
        "memory_bandwidth": 3e9,
        "effective_parallelism": 2.0,
        "product_parallelism": 1.5,
        "dispatch_overhead": 3e-4,
        "collectives": [],
        "memory_bytes": None,
        "overrun": 1.0,
        "attention_flops": None,
        "launch_seconds": 0.0,
    }
    pool = DevicePool("cpu", 2, 4, "CPU device", "")
    of_workers = lambda *cost: planned_shape(pool_shape(pool), *cost, is_here=True)  # noqa: E731
    shapes = lambda: (session.LocalBackend().shape(), of_workers(None))  # noqa: E731
    assert not any(shape.flops == 4e9 for shape in shapes())
    measurements.write(measurements.cache_file("calibration", "cpu", 8), found)
    assert all(shape.flops == 4e9 for shape in shapes())
    nominal = pool_shape(pool)
    without = launcher.PipeshardParallel(2, stage_option=launcher.AutoStageOption("model"))
    assert of_workers(without) == nominal
    assert session.LocalBackend().shape(without).flops == nominal.flops


def test_a_search_measures_the_devices_first(tmp_path, monkeypatch):
    """Those of this machine that no process holds, where the search is not told to plan without."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []
    monkeypatch.setattr("launcher.api.ray_backend.measure_first", measured.append)

    def plan(method, devices=None):
        train = launcher.parallelize(step, method=method, devices=devices)
        train.plan(jax.eval_shape(init, jax.random.key(0)), BATCHES[0])
        found = [shape.num_devices for shape in measured]
        measured.clear()
        return found

    search = functools.partial(launcher.PipeshardParallel, 2)
    assert plan(search(stage_option="auto")) == [8]
    assert plan(search(stage_option="auto"), jax.devices()[:2]) == [2]
    assert plan(search(stage_option=launcher.AutoStageOption("model"))) == []
    assert plan(search()) == []  # which chooses nothing by its predictions
    assert plan(launcher.DataParallel()) == []
    gpus = local_shape(2, 1, "NVIDIA H100 80GB HBM3")
    planned_shape(gpus, search(stage_option="auto"), is_here=True)
    planned_shape(local_shape(2, 1, "cpu"), search(stage_option="auto"), is_here=False)
    assert measured == []


@pytest.mark.parametrize(
    ("stats", "processes", "gib"),
    [({"bytes_limit": 60 << 30}, 1, 60), (None, 1, 40), (None, 2, 40)],
)
def test_a_plan_fills_what_this_process_may_have(tmp_path, monkeypatch, stats, processes, gib):
    """And not what a worker would have had."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    gpus = tuple(
        types.SimpleNamespace(
            platform="gpu",
            device_kind="NVIDIA H100 80GB HBM3",
            process_index=process,
            memory_stats=lambda: stats,
        )
        for process in range(processes)
    )
    assert session.LocalBackend(gpus).shape().memory_bytes == gib << 30
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    if stats is None:
        assert session.LocalBackend(gpus).shape().memory_bytes == 60 << 30


def test_what_is_not_known_of_devices_is_told(caplog):
    output.warn_once.cache_clear()
    pool = DevicePool("gpu", 1, 2, "NVIDIA A10G", "")
    planned_shape(pool_shape(pool), None, is_here=True)
    [line] = caplog.messages
    assert re.search("memory of NVIDIA A10G are not known: .* task=calibrate", line)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"cluster": "slurm"}, "cluster='slurm' is not one of"),
        ({"cluster": "local", "num_nodes": 2}, "is this process"),
        ({"cluster": "local", "num_devices_per_node": 9}, "this process has 8 devices"),
        ({"cluster": "ray", "num_nodes": 0}, "num_nodes=0 must be at least 1"),
        ({"cluster": "local", "num_cpus": 1}, "demands on a Ray, and cluster=.local. is this proc"),
        ({"resources": {"GPU": 1}}, r"resources\['GPU'\] .* use num_devices_per_node="),
        ({"resources": {"a": 0}}, r"resources\['a'\]=0 demands nothing"),
        ({"resources": {"a": 1}}, "1 worker demands a: 1, .* a private one on this machine has a"),
        ({"address": "ray://head:10001"}, "That is a Ray Client"),
        ({"address": "head"}, "Give .auto. for this machine.s Ray cluster, or host:port"),
    ],
)
def test_a_session_that_cannot_be_is_refused(settings, told):
    with pytest.raises((SessionError, ClusterError), match=told):
        launcher.init(**settings)
    launcher.shutdown()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda a: a.at[1, 2].add(0.5),
            r"\['w'\]: 1 of 6 elements differ.*\[1, 2\]: 5.5, desired 5",
        ),
        (lambda a: a.at[0, 1].set(jnp.nan), r"worst at \['w'\]\[0, 1\]: nan, desired 1.0"),
        (lambda a: a[:1], r"\['w'\]: shape \(1, 3\), desired \(2, 3\)"),
    ],
)
def test_assert_allclose_names_the_worst_element(change, told):
    tree = {"w": jnp.arange(6.0).reshape(2, 3), "n": 3}
    launcher.testing.assert_allclose(tree, jax.device_get(tree))
    launcher.testing.assert_allclose({"w": tree["w"] * (1 + 1e-6), "n": 3}, tree)
    with pytest.raises(AssertionError, match=told):
        launcher.testing.assert_allclose({**tree, "w": change(tree["w"])}, tree)
    with pytest.raises(AssertionError, match="the structures differ"):
        launcher.testing.assert_allclose({"w": tree["w"]}, tree)


def test_every_public_name_is_there():
    for name in launcher.__all__:
        assert getattr(launcher, name) is not None
    assert launcher.__all__ == dir(launcher)
    assert {"init", "shutdown", "parallelize", "DataParallel", "testing"} <= set(dir(launcher))
    with pytest.raises(AttributeError, match="has no attribute 'paralelize'"):
        launcher.paralelize  # noqa: B018


def test_parameters_that_no_gradient_reaches_are_logged_once(caplog):
    @launcher.parallelize(devices=jax.devices()[:1])
    def train(params, x):
        value, grads = launcher.value_and_grad(lambda p, x: jnp.mean(x @ p["used"]))(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    params = {"used": jnp.ones((4, 4)), "unused": jnp.zeros((4, 4))}
    for _ in range(2):
        params, _ = train(params, jnp.ones((8, 4)))
    assert caplog.messages == [
        "train: no gradient reaches 0.unused: the loss does not depend on it, or only through "
        "stop_gradient or whole numbers"
    ]
