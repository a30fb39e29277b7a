"""Models with state (batch statistics, counters): trained with, kept, and what is refused."""

import functools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from launcher import checkpoint
from launcher.config.compose import load
from launcher.config.optimizer import AdamW
from launcher.inference.eval_step import make_eval_step
from launcher.recipes import InputError, Model, build_model
from launcher.train.optimizer import build_optimizer
from launcher.train.program import build_program
from launcher.train.step import init_state, make_train_step

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_peer import COMMON, Trainee

OPTIONS = {"input_size": 8, "output_size": 2, "width": 4, "dropout": 0.0, "marked": "true"}
TWO_STAGES = ("parallel=manual", "parallel.num_stages=2", "parallel.num_micro_batches=2")
SLICES = 4
PLANS = {  # each of as many slices
    "stages": (*TWO_STAGES, "cluster.gpus=4"),
    "zero3": ("parallel=zero3", "cluster.gpus=4"),
}


def normed(kind="linen"):
    """The settings of a model of `normed`."""
    named = (f"{name}: {value}" for name, value in {"kind": kind, **OPTIONS}.items())
    options = f"model.options={{{', '.join(named)}}}"
    model = "model=custom", "model.module=normed", "allow_modules=[normed]", options
    return *model, *COMMON, "train.global_batch_size=32", "optimizer=sgd"


def one_device(words, steps):
    """The states of plain training, where each slice normalizes by itself and what they make is
    averaged."""
    config = load(words)
    program = build_program(config)
    model = build_model(config.model, "fp32")

    def loss(params, state, batch, key):
        slices = {k: x.reshape(SLICES, -1, x.shape[-1]) for k, x in batch.items()}
        found = jax.vmap(lambda part: model.loss(params, state, part, key))(slices)
        return jax.tree.map(lambda x: x.mean(0).astype(x.dtype), found)

    optimizer, schedule = build_optimizer(config.optimizer, config.train.steps)
    step = jax.jit(make_train_step(model._replace(loss=loss), optimizer, schedule))
    states = [jax.jit(functools.partial(init_state, model, optimizer))(program.seed)]
    for k in range(steps):
        states.append(step(states[-1], program.dataset.train(k))[0])
    return states


def test_running_averages_are_means_over_slices_saved_and_started_from(tmp_path):
    model = normed()
    trainee = Trainee([*model, *PLANS["stages"]], model=())
    trainee.create_and_save(str(tmp_path))
    saved, expected = restored(tmp_path), one_device(model, 4)
    check_close(saved["model_state"], expected[2])
    check_close(now(trainee), expected[4])
    moved = jax.tree.map(np.subtract, now(trainee), expected[0].model_state)
    assert all(map(np.any, jax.tree.leaves(moved)))

    # It lives on the devices of its stage, and is no parameter.
    assert {len(x.devices()) for x in jax.tree.leaves(now(trainee))} == {2}
    params = jax.tree.leaves(trainee.worker._program.state.params)
    assert trainee.worker._train.plan.num_parameters == sum(x.size for x in params)

    trainee.worker.create(str(tmp_path / "2"))
    jax.tree.map(np.testing.assert_array_equal, now(trainee), saved["model_state"])
    trainee.worker.close()


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_state_goes_on_under_another_plan(kind, tmp_path):
    model = normed(kind)
    stages, zero3 = (Trainee([*model, *plan], model=()) for plan in PLANS.values())
    losses = stages.create_and_save(str(tmp_path / "stages"))
    _, again = zero3.restore_and_save(str(tmp_path / "stages"), str(tmp_path / "zero3"))
    np.testing.assert_allclose(again, losses, rtol=1e-5)
    both = (restored(tmp_path / name) for name in ("stages", "zero3"))
    jax.tree.map(np.testing.assert_array_equal, *both)
    check_close(now(zero3), one_device(model, 4)[4])
    for trainee in (stages, zero3):
        trainee.worker.close()


def check_close(found, state):
    assert jax.tree.structure(found) == jax.tree.structure(state.model_state)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state.model_state), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def now(trainee):
    return trainee.worker._state.model_state


def restored(folder):
    with ocp.CheckpointManager(folder) as manager:
        return manager.restore(2, args=ocp.args.StandardRestore())


# -- one step as plain JAX -------------------------------------------------------------------------

SEED = jax.random.key_data(jax.random.key(11))
X = {"x": jnp.arange(12.0).reshape(4, 3)}


def counting(loss=None, init=None):
    """A model with a counter and a mean; with another loss or init, what that does."""

    def counts(params, state, batch, key):
        new = {"count": state["count"] + 1, "mean": 0.5 * state["mean"] + 0.5 * batch["x"].mean(0)}
        return jnp.mean(batch["x"] @ params), ({"seen": 1.0 * state["count"]}, new)

    def zeros(key):
        return jnp.ones(3), {"count": jnp.int32(0), "mean": jnp.zeros(3)}

    return Model(init or zeros, loss or counts, has_state=True)


def step_of(model, **how):
    optimizer, schedule = build_optimizer(AdamW(), 10)
    return make_train_step(model, optimizer, schedule, **how), init_state(model, optimizer, SEED)


def test_each_step_has_the_state_of_the_one_before_and_an_evaluation_has_the_last():
    step, state = step_of(counting())
    for k in range(3):
        state, metrics = step(state, X)
        assert metrics["seen"] == k
    assert state.model_state["count"] == 3
    evaluated = make_eval_step(counting())(state.model, X)
    assert (evaluated["seen"], state.model_state["count"]) == (3, 3)


def test_a_skipped_step_leaves_the_models_state_unchanged():
    step, state = step_of(counting(), skip_non_finite=True)
    state, _ = step(state, X)
    new, metrics = step(state, {"x": X["x"] * jnp.nan})
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, new.model_state, state.model_state)


def returns(make):
    """A model with state whose loss returns `make(value, state)`."""
    return counting(lambda params, state, batch, key: make(params.sum(), state))


def returns_state(**changed):
    return returns(lambda value, state: (value, ({}, {**state, **changed})))


def starts_with(state):
    return counting(init=lambda key: (jnp.ones(3), state(key)))


ONE = jnp.ones(())
REFUSED = [
    (counting(init=lambda key: jnp.ones(3)), "must return (parameters, state); it returns float32"),
    (starts_with(lambda key: {"a": key}), "must hold arrays of numbers.*; state['a'] is key<fry>"),
    (starts_with(lambda key: {"a": 0}), "must hold arrays of numbers.*; state['a'] is int"),
    (
        returns(lambda value, state: (value, state)),
        "it returns (float32[], a dict), with",
    ),
    (returns(lambda value, state: (value, {}, state)), "returns (float32[], a dict, a dict), with"),
    (returns(lambda value, state: (value, [{}, state])), "it returns (float32[], a list), with"),
    (returns(lambda value, state: (value, (state, {}))), "'count'] is missing, and was int32[]"),
    (returns(lambda value, state: (value, ({}, [state]))), "['count'] is missing, and was int32"),
    (returns_state(more=ONE), "; state['more'] is float32[], and was missing"),
    (returns_state(mean="x"), "; state['mean'] is a str, and was float32[3]"),
    (returns_state(mean=ONE), "; state['mean'] is float32[], and was float32[3]"),
    (returns_state(count=ONE), "; state['count'] is float32[], and was int32[]"),
    (
        Model(lambda key: ONE, lambda p, b, k: [p.sum(), {}]),
        "it returns a list, with has",
    ),
    (
        Model(lambda key: jnp.ones(3), lambda p, b, k: (p.sum(), ({}, {"count": 1}))),
        "of a Model(init, loss, has_state=True), (loss, (metrics, state)); it returns (float32",
    ),
]


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize(("model", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_a_model_with_state_is_refused_in_one_line(model, text):
    def train(x):
        step, state = step_of(model)
        return step(state, {"x": x})

    with pytest.raises(InputError, match=re.escape(text).replace(r"\.\*", ".*")) as error:
        jax.eval_shape(train, X["x"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            {"params": jnp.ones(3)},
            "it has model_state.count, model_state.mean, which the model does not have",
        ),
        (
            {"params": jnp.ones(3), "model_state": {"count": jnp.int32(0), "mean": jnp.zeros(4)}},
            "model_state.mean is (3,) there and (4,) in the model",
        ),
        (
            {"params": jnp.ones(3), "model_state": {"count": jnp.int32(0), "sum": jnp.zeros(3)}},
            "it has no model_state.sum, which the model has",
        ),
    ],
)
def test_a_checkpoint_of_another_state_is_refused_by_name(other, text, tmp_path):
    _, state = step_of(counting())
    checkpoint.save(tmp_path, 7, checkpoint.copy_to_host(state), {})
    checkpoint.check_model(tmp_path / "7", state.model)
    with pytest.raises(checkpoint.Mismatch) as error:
        checkpoint.check_model(tmp_path / "7", other)
    assert str(error.value) == text
