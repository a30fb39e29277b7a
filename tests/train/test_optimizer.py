"""Optimizers and schedules against their closed forms."""

import dataclasses
import math
import sys
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import launcher
from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.config.optimizer import OPTIMIZERS, AdamW, CustomOptimizer, optimizer
from launcher.recipes import InputError, Model
from launcher.train.optimizer import build_optimizer, build_schedule
from launcher.train.step import init_state, make_train_step

NAMES = tuple(name for name in OPTIMIZERS if name != "custom")
PARAMS = {"kernel": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "bias": jnp.array([1.0, -1.0])}
GRADS = {"kernel": jnp.array([[0.5, -0.25], [2.0, 1.0]]), "bias": jnp.array([-3.0, 0.1])}


def options(name, **fields):
    plain = {"decay": "constant", "warmup_steps": 0, "weight_decay": 0.0, "clip_norm": None}
    return OPTIMIZERS[name](**{**plain, **fields})


def updates(opts, grads=GRADS, steps=1):
    optimizer, _ = build_optimizer(opts, total_steps=100)
    state = optimizer.init(PARAMS)
    for _ in range(steps):
        out, state = optimizer.update(grads, state, PARAMS)
    return out


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), got, want)


@pytest.mark.parametrize(
    ("decay", "halfway"),
    [("constant", 1.0), ("linear", (1.0 + 0.1) / 2), ("cosine", (1.0 + 0.1) / 2)],
)
def test_schedule_rises_linearly_then_decays_to_the_final_rate(decay, halfway):
    opts = AdamW(learning_rate=1.0, warmup_steps=4, decay=decay, final_learning_rate=0.1)
    schedule = build_schedule(opts, total_steps=24)
    rise = [float(schedule(k)) for k in range(5)]
    np.testing.assert_allclose(rise, [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    assert float(schedule(14)) == pytest.approx(halfway)
    assert float(schedule(24)) == pytest.approx(1.0 if decay == "constant" else 0.1)
    assert float(schedule(1000)) == pytest.approx(float(schedule(24)))


COSINE = {k: 0.5 + 1.5 * (1 + math.cos(math.pi * k / 10)) / 2 for k in range(11)}
FROM_1 = {"learning_rate": 1.0, "warmup_steps": 0}
RESTARTED = {0: 1.0, 10: 0.5, 19: 0.0062, 20: 1.0, 30: 0.5, 40: 0.0}


@pytest.mark.parametrize(
    ("fields", "steps", "rates"),
    [
        ({"learning_rate": 2.0, "warmup_steps": 0, "final_learning_rate": 0.5}, 10, COSINE),
        ({"learning_rate": 0.0}, 10, {0: 0.0, 5: 0.0, 10: 0.0}),
        ({"learning_rate": 1.0, "warmup_steps": 9}, 5, {4: 0.5}),  # which outlasts the run
        (
            FROM_1 | {"warmup_steps": 4, "decay": "wsd", "decay_fraction": 0.25},
            40,
            {4: 1.0, 20: 1.0, 30: 1.0, 35: 0.5, 40: 0.0},
        ),
        (FROM_1 | {"decay": "cosine_restarts", "restarts": 1}, 40, RESTARTED),
    ],
)
def test_a_schedule_has_its_closed_form(fields, steps, rates):
    schedule = build_schedule(AdamW(**fields), steps)
    assert {k: float(schedule(k)) for k in rates} == pytest.approx(rates, abs=1e-4)


def test_adamw_first_step_is_the_sign_of_the_gradient_and_decay_of_matrices_only():
    got = updates(options("adamw", learning_rate=0.01, weight_decay=0.1, eps=0.0))
    want = {
        "kernel": -0.01 * (jnp.sign(GRADS["kernel"]) + 0.1 * PARAMS["kernel"]),
        "bias": -0.01 * jnp.sign(GRADS["bias"]),
    }
    assert_close(got, want)


@pytest.mark.parametrize(
    ("name", "fields", "update"),
    [
        # The same gradient thrice: Adam's moments equal it, and momentum sums it.
        (
            "adam",
            {"learning_rate": 0.01, "b1": 0.9, "b2": 0.95, "eps": 1e-3},
            lambda g: -0.01 * g / (jnp.abs(g) + 1e-3),
        ),
        ("sgd", {"learning_rate": 0.5, "momentum": 0.9}, lambda g: -0.5 * (1 + 0.9 + 0.81) * g),
        ("lion", {"learning_rate": 0.01}, lambda g: -0.01 * jnp.sign(g)),
    ],
)
def test_an_update_has_its_closed_form(name, fields, update):
    assert_close(updates(options(name, **fields), steps=3), jax.tree.map(update, GRADS))


def test_adafactor_steps_are_bounded_by_the_parameter_size():
    got = updates(options("adafactor", learning_rate=0.01))
    for name, update in got.items():
        rms = jnp.sqrt(jnp.mean(update**2))
        assert rms <= 0.01 * jnp.sqrt(jnp.mean(PARAMS[name] ** 2)) * 1.0001
        assert bool(jnp.all(jnp.sign(update) == -jnp.sign(GRADS[name])))


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_is_scaled_by_the_learning_rate_whatever_the_optimizer(name):
    decayed = updates(options(name, learning_rate=0.25, weight_decay=0.1))
    plain = updates(options(name, learning_rate=0.25))
    difference = jax.tree.map(jnp.subtract, decayed, plain)
    np.testing.assert_allclose(difference["kernel"], -0.025 * PARAMS["kernel"], atol=1e-6)
    np.testing.assert_array_equal(difference["bias"], 0.0)


def test_gradients_are_clipped_to_the_global_norm_before_the_optimizer():
    norm = math.sqrt(sum(float(jnp.sum(g**2)) for g in GRADS.values()))
    got = updates(options("sgd", learning_rate=1.0, momentum=0.0, clip_norm=0.5))
    assert_close(got, jax.tree.map(lambda g: -g * 0.5 / norm, GRADS))
    small = updates(options("sgd", learning_rate=1.0, momentum=0.0, clip_norm=norm * 1.01))
    assert_close(small, jax.tree.map(jnp.negative, GRADS))


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_descends_and_its_state_is_a_pytree_of_arrays(name):
    optimizer, _ = build_optimizer(options(name, learning_rate=0.02, clip_norm=1.0), 50)
    params, state = PARAMS, optimizer.init(PARAMS)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))

    def loss(p):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))

    start = loss(params)
    for _ in range(20):
        out, state = optimizer.update(jax.grad(loss)(params), state, params)
        params = jax.tree.map(jnp.add, params, out)
    assert loss(params) < 0.9 * start


def test_an_optimizer_is_a_line_and_a_file(tmp_path):
    """A setting of its own becomes an argument of Optax's transformation."""
    optimizer("rmsprop", "scale_by_rms", eps=1e-2)
    try:
        (tmp_path / "optimizer").mkdir()
        (tmp_path / "optimizer" / "rmsprop.yaml").write_text("name: rmsprop\nlearning_rate: 0.5\n")
        words = ["optimizer=rmsprop", "optimizer.eps=0.25", "optimizer.decay=constant"]
        opts = load([*words, "optimizer.warmup_steps=0"], [str(tmp_path)]).optimizer
        got = updates(dataclasses.replace(opts, clip_norm=None))
        second_moments = jax.tree.map(lambda g: 0.1 * g * g, GRADS)
        want = jax.tree.map(lambda g, v: -0.5 * g / jnp.sqrt(v + 0.25), GRADS, second_moments)
        assert_close(got, want)
        with pytest.raises(ConfigError, match="momentum is not a setting of optimizer=rmsprop"):
            load([*words, "optimizer.momentum=0.5"], [str(tmp_path)])
    finally:
        del OPTIMIZERS["rmsprop"]


# -- an optimizer of the user's own ----------------------------------------------------------------

PLATEAU = contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=1, rtol=0.5)
WANT_VALUE = {
    "in a chain": optax.chain(optax.sgd(0.5), PLATEAU),
    "named": optax.named_chain(("one", optax.sgd(0.5)), ("other", PLATEAU)),
    "by labels": optax.partition({"a": PLATEAU, "b": optax.sgd(1.0)}, {"w": "a", "v": "b"}),
    "every second step": optax.MultiSteps(contrib.momo(0.1), 2),
    "hyperparameters in the state": optax.inject_hyperparams(contrib.momo)(learning_rate=0.1),
    "where finite": optax.apply_if_finite(contrib.momo_adam(0.1), 3),
    "masked": optax.masked(contrib.momo_adam(0.1), {"w": True, "v": False}),
    "polyak": optax.polyak_sgd(max_learning_rate=0.1),
    "own": optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda grads, state, params, *, value: (jax.tree.map(lambda g: -value * g, grads), state),
    ),
    "wants nothing": optax.sgd(0.5),
}


def custom(monkeypatch, made):
    """What `optimizer=custom` takes of a module that makes this transformation."""
    module = ModuleType("own_optimizer")
    module.build = lambda options, steps: (made, lambda count: 1e-3)
    monkeypatch.setitem(sys.modules, "own_optimizer", module)
    return build_optimizer(CustomOptimizer(module="own_optimizer"), 10)


def _loss(params, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    launcher.mark_pipeline_boundary()
    return jnp.mean((hidden @ params["v"] - batch["x"]) ** 2), {}


TWO_LAYERS = Model(lambda key: {"w": jnp.eye(8) * 2, "v": jnp.eye(8) * 3}, _loss)
ROWS = {"x": np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)}


def states(step, state):
    found = []
    for _ in range(4):
        state, _ = step(state, ROWS)
        found.append(jax.device_get((state.params, state.opt_state)))
    return found


STAGES = launcher.PipeshardParallel(4, stage_option=launcher.UniformStageOption(num_stages=2))
UNDER = [
    *((form, None) for form in WANT_VALUE),
    ("where finite", STAGES),
    *(
        pytest.param("in a chain", method, marks=pytest.mark.stress)
        for method in (STAGES, launcher.DataParallel(2), launcher.Zero3Parallel())
    ),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("form", "method"), UNDER)
def test_an_optimizer_that_wants_the_loss_gets_that_of_the_whole_batch(form, method, monkeypatch):
    built, made = custom(monkeypatch, WANT_VALUE[form]), WANT_VALUE[form]
    state = init_state(TWO_LAYERS, built[0], jax.random.key_data(jax.random.key(0)))
    step = make_train_step(TWO_LAYERS, *built)

    @jax.jit
    def by_hand(state, batch):
        (loss, _), grads = jax.value_and_grad(_loss, has_aux=True)(state.params, batch, None)
        value = {} if form == "wants nothing" else {"value": loss}
        updates, opt_state = made.update(grads, state.opt_state, state.params, **value)
        params = optax.apply_updates(state.params, updates)
        return dataclasses.replace(state, params=params, opt_state=opt_state), loss

    on_four = {"devices": jax.devices()[:4], "donate_argnums": ()}
    run = launcher.parallelize(step, method=method, **on_four) if method else jax.jit(step)
    for got, want in zip(states(run, state), states(by_hand, state), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (optax.lbfgs(), "required keyword-only arguments: 'grad' and 'value_fn'"),
        (contrib.sophia(0.1), "obj_fn must be provided"),
        (
            optax.GradientTransformation(optax.sgd(0.1).init, lambda g, s, p, hessian: (g, s)),
            r"missing 1 required positional argument: 'hessian'",
        ),
        (
            optax.stateless(lambda updates, params: jax.tree.map(jnp.sum, updates)),
            r"updates\['v'\] is \(\), and was \(8, 8\)",
        ),
    ],
)
def test_an_optimizer_that_wants_more_or_returns_less_is_refused_in_one_line(
    made, told, monkeypatch
):
    built = custom(monkeypatch, made)
    state = init_state(TWO_LAYERS, built[0], jax.random.key_data(jax.random.key(0)))
    with pytest.raises(InputError, match=told):
        jax.eval_shape(make_train_step(TWO_LAYERS, *built), state, ROWS)
