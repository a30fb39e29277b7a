"""Stages that are equal are compiled once, and each runs on devices of its own."""

import functools
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.base.spans import SpanRecorder
from launcher.plan import local_shape
from launcher.plan.methods import PipeshardParallel, UniformStageOption
from launcher.recipes import build_model
from launcher.recipes.models.mlp import MLPOptions
from launcher.runtime import StepCompilation, StepServices, compile_step, wait_for_more
from launcher.trace import trace_step

MODEL = build_model(MLPOptions(input_size=4, hidden_size=8, output_size=2, num_layers=4), "fp32")
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
BATCH = {"x": X, "y": X[:, :2] ** 2}
KINDS = {"forward", "backward", "zeros"}


def step(params, batch):
    def loss(params, batch):
        return MODEL.loss(params, batch, None)

    (value, _), grads = launcher.value_and_grad(loss, has_aux=True)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.fixture(scope="module")
def traced():
    return trace_step(step, (jax.eval_shape(MODEL.init, jax.random.key(0)), BATCH))


def compiled(traced, monkeypatch, num_devices):
    """The step in four stages, and how many programs were compiled for it."""
    compiles = []
    compile_one = jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self, **_: compiles.append(self) or compile_one(self)
    )
    method = PipeshardParallel(2, stage_option=UniformStageOption(4))
    plan = method.plan(traced, local_shape(num_devices, 1, "cpu"))
    return compile_step(traced, plan, jax.devices()[:num_devices]), len(compiles)


def trained(executable):
    state, losses = executable.create(MODEL.init, jax.random.key(0)), []
    for _ in range(3):
        before = state
        state, loss = executable(state, BATCH)
        losses.append(float(loss))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))  # donated
    return state, losses


@pytest.mark.parametrize("num_devices", [4, pytest.param(8, marks=pytest.mark.stress)])
def test_equal_stages_are_compiled_once(traced, monkeypatch, num_devices):
    executable, compiles = compiled(traced, monkeypatch, num_devices)
    texts = executable.hlo_text()
    inner = [stage for stage in (1, 2) for kind in KINDS if f"stage.{stage}.{kind}" in texts]
    assert len(inner) == 6, "the test's two inner stages are no longer what it thinks"
    assert executable.peak_bytes > 0  # a program that was loaded for other devices tells its own
    assert compiles == len(texts) - 4  # the update of an inner stage is its twin's, too
    services = StepServices(None, None, SpanRecorder())
    with ThreadPoolExecutor(1) as pool:
        begun = StepCompilation(traced, executable.plan, jax.devices(), services, pool)
        assert len(begun.programs) == compiles  # known before any of them is compiled
        assert begun.result().hlo_text().keys() == texts.keys()

    state, losses = trained(executable)
    with monkeypatch.context() as patch:
        patch.setattr("launcher.runtime.programs.compile.loaded_for", lambda *_: None)
        each, compiles = compiled(traced, patch, num_devices)
    assert compiles == len(texts)
    expected, same = trained(each)
    assert losses == same
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.sharding, b.sharding), state, expected)
    _, plain = jax.jit(step)(MODEL.init(jax.random.key(0)), BATCH)
    np.testing.assert_allclose(losses[0], plain, rtol=1e-5)


def test_each_compilation_is_reported_as_it_is_done():
    programs = [Future() for _ in range(3)]
    programs[1].set_result(None)
    assert wait_for_more(programs, 0) == 1
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_more, programs, 1)
        programs[0].set_exception(ValueError())  # it is over; who asks for its result is told
        assert waiting.result(timeout=60) == 2
    programs[2].set_result(None)
    assert wait_for_more(programs, 3) == 3


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled_back(x, scale):
    """`x`, whose gradient is scaled: a rule that the forward program does not tell."""
    return x * 1.0


scaled_back.defvjp(lambda x, _: (x * 1.0, None), lambda scale, _, seed: (seed * scale,))


def test_stages_with_other_rules_of_derivatives_are_not_equal():
    def loss(params, x):
        for i, w in enumerate(params):
            if i > 0:
                launcher.mark_pipeline_boundary()
            x = scaled_back(jnp.tanh(x @ w), float(i + 1))
        return (x**2).mean()

    def step(params, x):
        grads = launcher.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = list(np.random.default_rng(1).normal(size=(4, 4, 4)).astype(np.float32))
    grads = jax.grad(loss)(params, X)
    traced = trace_step(step, (params, X))
    method = PipeshardParallel(2, stage_option=UniformStageOption(4))
    plan = method.plan(traced, local_shape(4, 1, "cpu"))
    executable = compile_step(traced, plan, jax.devices()[:4])
    found = executable(*jax.device_put((params, X), executable.in_shardings))
    for w, grad, new in zip(params, grads, found, strict=True):
        np.testing.assert_allclose(new, w - 0.1 * grad, rtol=1e-5, atol=1e-6)
