"""The train step as plain JAX: what it computes, what it draws, what it leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from launcher.config.optimizer import AdamW
from launcher.inference.eval_step import make_eval_step
from launcher.recipes import InputError, Model, build_model
from launcher.recipes.models.mlp import MLPOptions
from launcher.train.optimizer import build_optimizer
from launcher.train.step import init_state, make_train_step

SEED = jax.random.key_data(jax.random.key(11))
BATCH = {"x": jnp.arange(12.0).reshape(4, 3) / 10, "y": jnp.ones((4, 2))}


@pytest.fixture
def parts():
    model = build_model(
        MLPOptions(input_size=3, hidden_size=5, output_size=2, num_layers=2), "fp32"
    )
    return model, *build_optimizer(AdamW(warmup_steps=3, clip_norm=0.1), 10)


def test_a_step_is_gradient_clip_optimizer_update(parts):
    model, optimizer, schedule = parts
    state = init_state(model, optimizer, SEED)
    new, metrics = jax.jit(make_train_step(model, optimizer, schedule))(state, BATCH)

    @jax.jit
    def by_hand(params, opt_state):
        (loss, _), grads = jax.value_and_grad(model.loss, has_aux=True)(params, BATCH, None)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return loss, grads, optax.apply_updates(params, updates), opt_state

    loss, grads, params, opt_state = by_hand(state.params, state.opt_state)
    jax.tree.map(np.testing.assert_allclose, (new.params, new.opt_state), (params, opt_state))
    assert (int(new.step), new.key.tolist()) == (1, state.key.tolist())
    assert jax.tree.structure(new) == jax.tree.structure(state)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    assert norm > 0.1  # it is the norm before clipping
    assert metrics["loss"] == loss
    assert float(metrics["grad_norm"]) == pytest.approx(float(norm))
    assert float(metrics["learning_rate"]) == pytest.approx(float(schedule(0)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_skipped_step_leaves_the_state_as_it_was_but_its_number(parts, bad):
    model, optimizer, schedule = parts
    step = jax.jit(make_train_step(model, optimizer, schedule, skip_non_finite=True, ema=0.5))
    state, metrics = step(init_state(model, optimizer, SEED, averages=True), BATCH)
    assert metrics["skipped"] == 0
    new, metrics = step(state, {**BATCH, "x": BATCH["x"] * bad})
    assert metrics["skipped"] == 1
    assert float(metrics["learning_rate"]) == pytest.approx(float(schedule(1)))
    assert int(new.step) == 2
    before, after = ((s.params, s.opt_state, s.ema) for s in (state, new))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    again, metrics = step(new, BATCH)
    assert float(metrics["learning_rate"]) == pytest.approx(float(schedule(1)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(again.params))


def test_the_first_state_is_a_function_of_the_seed(parts):
    model, optimizer, _ = parts
    one, same = (init_state(model, optimizer, SEED).params for _ in range(2))
    other = init_state(model, optimizer, SEED + 1).params
    jax.tree.map(np.testing.assert_array_equal, one, same)
    assert not np.array_equal(one["layers_0"]["kernel"], other["layers_0"]["kernel"])


def test_every_step_draws_its_own_random_numbers_and_draws_them_again_after_a_restart():
    def loss(params, batch, key):
        return params["w"] * jnp.mean(batch["x"]), {"drawn": jax.random.uniform(key)}

    model = Model(init=lambda key: {"w": jnp.float32(1.0)}, loss=loss)
    optimizer, schedule = build_optimizer(AdamW(), 10)
    step = make_train_step(model, optimizer, schedule)
    states, drawn = [init_state(model, optimizer, SEED)], []
    for _ in range(4):
        state, metrics = step(states[-1], BATCH)
        states.append(state)
        drawn.append(float(metrics["drawn"]))
    assert len(set(drawn)) == 4
    assert float(step(states[2], BATCH)[1]["drawn"]) == drawn[2]


def test_evaluation_switches_dropout_off_and_keeps_the_models_own_metrics():
    def loss(params, batch, key):
        assert key is None
        return jnp.mean(batch["x"]) * params["w"], {"accuracy": jnp.float32(0.5)}

    evaluate = make_eval_step(Model(init=lambda key: {}, loss=loss))
    metrics = evaluate({"params": {"w": jnp.float32(2.0)}}, BATCH)
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(
        {"loss": 1.1, "accuracy": 0.5}
    )


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"hits": jnp.ones(4)}, r"its metric 'hits' is float32\[4\]: take its mean"),
        (
            {"ok": 1.0, "both": (1.0, 2.0)},
            r"its metric 'both' is \(float32\[\], float32\[\]\): take its mean",
        ),
        ({"none": None}, "its metric 'none' is a NoneType"),
        ([1.0], r"must return \(loss, metrics\), .*; it returns \(float32\[\], a list\)"),
        ({"grad_norm": 1.0}, "the name 'grad_norm', which the launcher's own has"),
        ({"loss": 1.0}, "the name 'loss', which the launcher's own has"),
    ],
)
def test_metrics_that_cannot_be_logged_are_refused_by_name_when_traced(parts, metrics, words):
    _, optimizer, schedule = parts
    model = Model(lambda key: jnp.ones(()), lambda params, batch, key: (params**2, metrics))
    state = init_state(model, optimizer, SEED)
    for step, of in (
        (make_train_step(model, optimizer, schedule), state),
        (make_eval_step(model), state.model),
    ):
        with pytest.raises(InputError, match=words):
            jax.eval_shape(step, of, BATCH)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (lambda p: p, r"must return \(loss, metrics\), .*; it returns float32\[\]"),
        (lambda p: (p * jnp.ones(3), {}), r"the loss is float32\[3\]"),
    ],
)
def test_a_loss_of_another_form_is_refused(parts, out, words):
    _, optimizer, schedule = parts
    model = Model(lambda key: jnp.ones(()), lambda params, batch, key: out(params))
    state = init_state(model, optimizer, SEED)
    with pytest.raises(InputError, match=words):
        jax.eval_shape(make_train_step(model, optimizer, schedule), state, BATCH)
