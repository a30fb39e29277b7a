"""Interleaved and zero-bubble schedules compute what plain `jax.jit` computes on one device."""

import functools

import jax
import numpy as np
import optax
import pytest
from filled import filled_params

import launcher
from launcher.plan import local_shape, make_forward_plan
from launcher.plan.methods import PipeshardParallel, UniformStageOption
from launcher.recipes import build_model
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.mlp import MLPOptions
from launcher.runtime import compile_step
from launcher.trace import trace_step

BATCH, STEPS = 12, 4
MODELS = {
    "mlp": MLPOptions(input_size=8, hidden_size=16, output_size=4, num_layers=4),
    "gpt_tied": GPTOptions(
        vocab_size=32,
        hidden_size=16,
        num_layers=4,
        num_heads=2,
        sequence_length=8,
        mlp_ratio=2,
        tie_embeddings=True,
    ).filled(),
}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3, weight_decay=0.1))


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


def training(name):
    model = build_model(MODELS[name], "fp32")

    def init(key):
        del key
        params = filled_params(model, std=0.02 if name == "gpt_tied" else None)
        return params, OPTIMIZER.init(params)

    def step(state, batch):
        params, opt = state
        (loss, _), grads = launcher.value_and_grad(
            lambda p: model.loss(p, batch, None), has_aux=True
        )(params)
        updates, opt = OPTIMIZER.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), (loss, optax.tree.norm(grads))

    return init, step


def run(call, state, options):
    history = []
    for batch in batches(options):
        state, numbers = call(state, batch)
        history.append([float(x) for x in numbers])
    return state, history


@pytest.fixture(scope="module")
def serial():
    @functools.cache
    def found(name):
        init, step = training(name)
        return run(jax.jit(step), jax.jit(init)(jax.random.key(0)), MODELS[name])

    return found


def compiled(name, devices, num_stages, **how):
    options = MODELS[name]
    init, step = training(name)
    shapes = jax.eval_shape(init, jax.random.key(0)), next(batches(options))
    traced = trace_step(step, shapes)
    method = PipeshardParallel(stage_option=UniformStageOption(num_stages), **how)
    plan = method.plan(traced, local_shape(devices, 1, "cpu"))
    executable = compile_step(traced, plan, jax.devices())
    return executable, executable.create(init, jax.random.key(0))


def check(name, expected, executable, state):
    state, history = run(executable, state, MODELS[name])
    np.testing.assert_allclose(history, expected[1], rtol=1e-5)
    # Adam divides by the root of tiny second moments: parameters agree to absolute 1e-5.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=2e-5),
        state[0],
        expected[0][0],
    )
    return state


def case(name, devices, schedule, stages, micro_batches, remat="none", marks=()):
    parallel = {
        "schedule": schedule,
        "num_stages": stages,
        "num_micro_batches": micro_batches,
        "remat": remat,
    }
    title = f"{name}-{schedule}-{stages}x{micro_batches}-on-{devices}"
    return pytest.param(name, devices, parallel, marks=marks, id=title)


SLOW, BY_HAND = [pytest.mark.slow], [pytest.mark.stress]
CASES = [
    case("mlp", 4, "zero_bubble", 4, 6),
    case("mlp", 2, "interleaved_1f1b", 4, 3),  # rounds that do not divide
    case("mlp", 3, "eager_1f1b", 3, 4),
    case("gpt_tied", 3, "zero_bubble", 3, 4, remat=["none", "full", "none"], marks=BY_HAND),
    case("gpt_tied", 2, "interleaved_1f1b", 4, 4, marks=SLOW),  # the tied weight is on both meshes
    case("mlp", 4, "interleaved_1f1b", 4, 3, remat="dots_saveable"),  # two replicas
    case("mlp", 1, "zero_bubble", 1, 2, marks=SLOW),
    case("mlp", 2, "zero_bubble", 2, 1, marks=BY_HAND),
    case("mlp", 1, "interleaved_1f1b", 4, 4, marks=BY_HAND),  # all on one mesh
    case("gpt_tied", 4, "interleaved_1f1b", 4, 3, remat="dots_saveable", marks=BY_HAND),
    case("gpt_tied", 4, "zero_bubble", 2, 3, remat="full", marks=BY_HAND),
    case("gpt_tied", 4, "zero_bubble", 4, 4, marks=BY_HAND),
    case("gpt_tied", 3, "interleaved_1f1b", 3, 2, marks=BY_HAND),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "devices", "parallel"), CASES)
def test_a_schedule_equals_plain_jit(serial, name, devices, parallel):
    check(name, serial(name), *compiled(name, devices, **parallel))


def test_evaluation_passes_through_every_stage_of_a_mesh(serial):
    executable, state = compiled(
        "mlp", 2, schedule="interleaved_1f1b", num_stages=4, num_micro_batches=4
    )
    state = check("mlp", serial("mlp"), executable, state)
    model = build_model(MODELS["mlp"], "fp32")

    def evaluate(params, batch):
        return launcher.microbatched(lambda p, b: model.loss(p, b, None)[0])(params, batch)

    batch = next(batches(MODELS["mlp"]))
    traced = trace_step(evaluate, (jax.eval_shape(lambda: state[0]), batch), donate_argnums=())
    forward = compile_step(traced, make_forward_plan(traced, executable.plan), jax.devices())
    assert executable.in_shardings[0][0] == forward.in_shardings[0]
    want = model.loss(jax.device_get(state[0]), batch, None)[0]
    np.testing.assert_allclose(float(forward(state[0], batch)), float(want), rtol=1e-5)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
