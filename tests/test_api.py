"""The public Python front: a step is parallelized, created in place, run, evaluated, replayed."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.trace import TraceError

sys.path.insert(0, str(Path(__file__).parent / "runtime"))
from tiny import BATCHES, init, step


def serial(batches):
    state, losses = jax.jit(init)(jax.random.key(0)), []
    for batch in batches:
        state, loss = jax.jit(step)(state, batch)
        losses.append(float(loss))
    return losses


def run(train, batches):
    state, losses = train.create(init, jax.random.key(0), like=batches[0]), []
    for batch in batches:
        state, loss = train(state, batch)
        losses.append(float(loss))
    return state, losses


@pytest.mark.parametrize(
    "method",
    [
        None,
        launcher.PipeshardParallel(
            num_micro_batches=3, stage_option=launcher.UniformStageOption(4)
        ),
    ],
)
def test_a_parallelized_step_is_the_step(method):
    train = launcher.parallelize(step, method=method, devices=jax.devices()[:4])
    np.testing.assert_allclose(run(train, BATCHES)[1], serial(BATCHES), rtol=1e-5)


def test_decorator_replay_and_evaluation():
    method = launcher.PipeshardParallel(
        num_micro_batches=2, stage_option=launcher.UniformStageOption(2)
    )
    train = launcher.parallelize(method=method, devices=jax.devices()[:2])(step)
    assert train.__name__ == "step"
    state, losses = run(train, BATCHES[:2])
    plan = launcher.Plan.from_dict(json.loads(json.dumps(train.plan(state, BATCHES[0]).to_dict())))
    again = launcher.parallelize(step, method=launcher.Replay(plan), devices=jax.devices())
    assert run(again, BATCHES[:2])[1] == losses

    def of(params, x):
        for name in ("w1", "w2", "tied"):
            x = jnp.tanh(x @ params[name])
            launcher.mark_pipeline_boundary()
        return (x**2).mean()

    evaluate = launcher.parallelize(
        lambda state, x: launcher.microbatched(of)(state[0], x),
        method=launcher.Follow(plan),
        donate_argnums=(),
    )
    want = of(jax.device_get(state[0]), BATCHES[0])
    np.testing.assert_allclose(float(evaluate(state, BATCHES[0])), float(want), rtol=1e-5)


def test_a_plan_needs_shapes_alone():
    train = launcher.parallelize(
        step, method=launcher.PipeshardParallel(stage_option=launcher.UniformStageOption(4))
    )
    shapes = jax.eval_shape(init, jax.random.key(0)), jax.eval_shape(lambda: BATCHES[0])
    assert len(train.plan(*shapes).stages) == 4


def test_new_shapes_compile_again_and_say_so():
    train = launcher.parallelize(step, devices=jax.devices()[:1])
    state, _ = run(train, BATCHES[:1])
    with pytest.warns(UserWarning, match="compiled again"):
        train(state, BATCHES[0][:12])


def test_what_is_no_array_is_named():
    with pytest.raises(TraceError, match="given a str"):
        launcher.parallelize(step)(("state", "opt"), BATCHES[0])


def test_every_public_name_is_there():
    for name in launcher.__all__:
        assert getattr(launcher, name) is not None
    assert set(launcher.__all__) <= set(dir(launcher))
