"""Steps with several losses: by every method one device's training."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import several
from several import BATCH, STEPS, jax_own, ours

import launcher
from launcher.plan import Plan
from launcher.trace import BatchError

ROUNDS = 3
METHODS = {
    "data": launcher.DataParallel(),
    "data_micro": launcher.DataParallel(num_micro_batches=2),
    "zero2": launcher.Zero2Parallel(num_micro_batches=2),
    "zero3": launcher.Zero3Parallel(),
    "shard": launcher.ShardParallel(num_micro_batches=2, logical_mesh_shape=(2, 2)),
    "stages": launcher.PipeshardParallel(
        num_micro_batches=2, stage_option=launcher.UniformStageOption(2)
    ),
    "auto": launcher.PipeshardParallel(num_micro_batches=None, stage_option="auto"),
}
REFUSED = {("halves", "data_micro"), ("halves", "zero2")}  # more slices than a half has rows


def pairs():
    for make, name in itertools.product(STEPS, METHODS):
        if (make.__name__, name) not in REFUSED:
            yield pytest.param(make, METHODS[name], id=f"{make.__name__}-{name}")


def trained(step, state):
    history = []
    for k in range(ROUNDS):
        state, found = step(state, {**BATCH, "x": BATCH["x"] + k / 4})
        history.append(jax.tree.map(np.asarray, found))
    return state, history


def parallelized(make, method, **options):
    step, init = ours(make)
    return launcher.parallelize(step, method=method, devices=jax.devices()[:4], **options), init


def same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.sampled(19)
@pytest.mark.parametrize(("make", "method"), [*pairs()])
def test_training_is_that_of_one_device(make, method):
    step, init = parallelized(make, method)
    state = step.create(init, like=BATCH)
    placed = jax.tree.map(lambda x: x.sharding, state)
    state, history = trained(step, state)
    assert jax.tree.map(lambda x: x.sharding, state) == placed  # no call moves what it is given
    expected, init = jax_own(make)
    same((state, history), trained(jax.jit(expected), init()))


def test_arguments_that_are_not_donated_stay():
    """Although losses in between need them elsewhere, or after they were updated."""
    step, init = parallelized(several.generated_outside, METHODS["stages"], donate_argnums=())
    state = step.create(init, like=BATCH)
    before = jax.tree.map(np.asarray, state)
    first, second = step(state, BATCH), step(state, BATCH)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    jax.tree.map(np.testing.assert_array_equal, state, before)


@pytest.mark.slow
def test_a_plan_on_disk_is_replayed_and_an_evaluation_follows():
    step, init = parallelized(several.gan, METHODS["stages"])
    plan = step.plan(jax.eval_shape(init), BATCH)
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan

    replayed, _ = parallelized(several.gan, launcher.Replay(again))
    state, _ = replayed(replayed.create(init, like=BATCH), BATCH)

    def evaluation(state, batch):
        d, g = state["d"]["params"], state["g"]["params"]
        return (
            launcher.microbatched(several.generator_loss)(g, d, batch),
            launcher.microbatched(several.critic_loss)(d, g, batch),
        )

    evaluate = launcher.parallelize(
        evaluation, method=replayed, donate_argnums=(), devices=jax.devices()[:4]
    )
    same(evaluate(state, BATCH), evaluation(jax.device_get(state), BATCH))


@pytest.mark.slow
def test_a_second_loss_that_compares_examples_has_the_whole_batch_under_one_microbatch():
    def contrastive(p, b):
        return -jnp.diag(jax.nn.log_softmax(several.net(p, b["x"]) @ b["y"].T)).mean()

    def make(value_and_grad, evaluated):
        def step(state, batch):
            value, grads = value_and_grad(several.error)(state["params"], batch)
            state = several.updated(state, grads)
            other, grads = value_and_grad(contrastive)(state["params"], batch)
            return several.updated(state, grads), (value, other)

        return step, several.first_state

    step, init = parallelized(make, METHODS["data"])
    expected, _ = jax_own(make)
    state = jax.tree.map(jnp.asarray, init())
    same(trained(step, state), trained(jax.jit(expected), init()))
    assert "share the whole batch" in step.last_plan.notes[0]
    step, _ = parallelized(make, METHODS["data_micro"])
    with pytest.raises(BatchError, match="one microbatch"):
        step.plan(init(), BATCH)


def test_each_part_of_a_profiled_step_is_timed():
    step, init = parallelized(several.gan, METHODS["stages"])
    state = step.create(init, like=BATCH)
    _, times = step.executable(state, BATCH).profile(state, BATCH)
    assert len(times.stage_seconds) == 4
    assert {task.stage for task in times.task_seconds} == {0, 1, 2, 3}
    assert all(seconds > 0 for seconds in times.stage_seconds)
