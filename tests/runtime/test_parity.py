"""The pipelined step computes what plain `jax.jit` computes on one device."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from filled import filled_params

import launcher
from launcher.plan import local_shape, make_forward_plan
from launcher.plan.methods import DataParallel, PipeshardParallel, UniformStageOption
from launcher.recipes import build_model
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.mlp import MLPOptions
from launcher.runtime import compile_step
from launcher.trace import trace_step

BATCH, STEPS = 16, 8
SMALL_GPT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_layers": 4,
    "num_heads": 2,
    "sequence_length": 8,
    "mlp_ratio": 2,
}
MODELS = {
    "mlp": MLPOptions(input_size=8, hidden_size=16, output_size=4, num_layers=4),
    "gpt_tied": GPTOptions(**SMALL_GPT, tie_embeddings=True).filled(),
    "gpt_untied": GPTOptions(**SMALL_GPT, tie_embeddings=False).filled(),
}
GRID = list(itertools.product((1, 2, 4), (1, 4, 8), ("gpipe", "1f1b")))
# The others are for `stress`: methods and schedules have their own comparisons with one device.
COVERING = {
    ("mlp", (1, 1, "1f1b")),
    ("mlp", (2, 4, "1f1b")),
}


def batches(options):
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        if options.name == "mlp":
            x = rng.normal(size=(BATCH, options.input_size)).astype(np.float32)
            yield {"x": x, "y": x[:, : options.output_size] ** 2}
        else:
            text = rng.integers(0, options.vocab_size, (BATCH, options.sequence_length + 1))
            text = text.astype(np.int32)
            yield {"tokens": text[:, :-1], "targets": text[:, 1:]}


def training(options):
    model = build_model(options, "fp32")
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3, weight_decay=0.1))

    def init(key):
        del key
        params = filled_params(model, std=0.02 if options.name == "gpt" else None)
        return {"params": params, "opt": optimizer.init(params), "step": jnp.int32(0)}

    def step(state, batch):
        (loss, _), grads = launcher.value_and_grad(
            lambda p: model.loss(p, batch, None), has_aux=True
        )(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = {"params": params, "opt": opt, "step": state["step"] + 1}
        return new, {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    return SimpleNamespace(model=model, init=init, step=step)


def run(call, state, options):
    history = []
    for batch in batches(options):
        state, metrics = call(state, batch)
        history.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return state, np.array(history)


@pytest.fixture(scope="module")
def serial():
    """Histories and final states by plain `jax.jit` on one device; `value_and_grad` means there
    what JAX's own does."""

    @functools.cache
    def found(name):
        t, options = training(MODELS[name]), MODELS[name]
        return run(jax.jit(t.step), jax.jit(t.init)(jax.random.key(0)), options)

    return found


def pipeline(stages, num_micro_batches, **how):
    return PipeshardParallel(num_micro_batches, stage_option=UniformStageOption(stages), **how)


def compiled(options, method, devices):
    t = training(options)
    shapes = jax.eval_shape(t.init, jax.random.key(0)), next(batches(options))
    traced = trace_step(t.step, shapes)
    plan = method.plan(traced, local_shape(devices, 1, "cpu"))
    executable = compile_step(traced, plan, jax.devices())
    return executable, executable.create(t.init, jax.random.key(0))


def check(options, expected, executable, state):
    state, history = run(executable, state, options)
    np.testing.assert_allclose(history, expected[1], rtol=1e-5)
    # Adam divides by the root of tiny second moments: parameters agree to absolute 1e-5.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=2e-5),
        state["params"],
        expected[0]["params"],
    )
    assert int(state["step"]) == STEPS


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "schedule"),
    [
        pytest.param(case[0], *case[1], marks=[] if case in COVERING else [pytest.mark.stress])
        for case in itertools.product(("mlp", "gpt_tied"), GRID)
    ],
)
def test_manual_equals_plain_jit(serial, name, stages, micro_batches, schedule):
    options = MODELS[name]
    method = pipeline(stages, micro_batches, schedule=schedule)
    check(options, serial(name), *compiled(options, method, devices=stages))


@pytest.mark.parametrize(
    ("name", "stages", "devices", "micro_batches", "schedule", "remat"),
    [
        pytest.param("gpt_untied", 2, 2, 4, "1f1b", "none", marks=pytest.mark.stress),
        pytest.param("gpt_untied", 4, 4, 4, "gpipe", "full", marks=pytest.mark.stress),
        pytest.param("gpt_tied", 2, 2, 4, "1f1b", "full", marks=pytest.mark.stress),
        # two replicas a stage
        pytest.param("gpt_tied", 2, 4, 4, "1f1b", "none", marks=pytest.mark.stress),
        pytest.param("gpt_tied", 2, 8, 2, "gpipe", "full", marks=pytest.mark.stress),  # four
        # stages of unequal size
        pytest.param("gpt_untied", 3, 3, 2, "1f1b", "none", marks=pytest.mark.stress),
        ("mlp", 4, 8, 8, "1f1b", "none"),
    ],
)
def test_replicas_remat_and_uneven_stages(
    serial, name, stages, devices, micro_batches, schedule, remat
):
    options = MODELS[name]
    method = pipeline(stages, micro_batches, schedule=schedule, remat=remat)
    check(options, serial(name), *compiled(options, method, devices))


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt_tied", marks=pytest.mark.stress)])
def test_data_parallel_equals_plain_jit(serial, name, micro_batches):
    options = MODELS[name]
    check(options, serial(name), *compiled(options, DataParallel(micro_batches), devices=4))


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt_tied", marks=pytest.mark.stress)])
def test_evaluation_on_the_train_steps_stages(name):
    options = MODELS[name]
    executable, state = compiled(options, pipeline(4, 4), devices=4)
    model = build_model(options, "fp32")

    def evaluate(params, batch):
        return launcher.microbatched(lambda p, b: model.loss(p, b, None)[0])(params, batch)

    batch = next(batches(options))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state["params"])
    traced = trace_step(evaluate, (shapes, batch), donate_argnums=())
    forward = compile_step(traced, make_forward_plan(traced, executable.plan), jax.devices())
    got = forward(state["params"], batch)
    assert executable.in_shardings[0]["params"] == forward.in_shardings[0]
    want = jax.jit(evaluate)(jax.device_get(state["params"]), batch)
    np.testing.assert_allclose(float(got), float(want), rtol=1e-5)
    # Nothing was donated: the parameters are still there.
    executable(state, batch)
