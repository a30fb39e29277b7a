"""Losses that sum, mask or compare examples: by every method one device's training, or refused."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import launcher
from launcher.trace import BatchError

ROWS, ROUNDS = 8, 3
RNG = np.random.default_rng(2)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32) / 2


PARAMS = {"a": normal(4, 6), "b": normal(6, 6), "c": normal(6, 3)}
BATCH = {
    "x": normal(ROWS, 4),
    "t": normal(ROWS, 3),
    "label": RNG.integers(0, 3, ROWS),
    "mask": np.array([0, 0, 1, 1, 1, 0, 1, 1], np.float32),
}


def net(p, b):
    h = jnp.tanh(b["x"] @ p["a"])
    launcher.mark_pipeline_boundary()
    h = jnp.tanh(h @ p["b"])
    launcher.mark_pipeline_boundary()
    return h @ p["c"]


def losses(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(net(p, b), b["label"])


def masked(p, b):
    each = losses(p, b)
    loss = (each * b["mask"]).sum() / b["mask"].sum()
    return loss, {
        "total": each.sum(),
        "worst": each.max(),
        "perplexity": jnp.exp(loss),
        "range": (each.max() - each.min()) / (p["a"] ** 2).sum(),
    }


def decayed(p, b):
    y = net(p, b)
    hits = y.argmax(1) == b["label"]
    squares = ((y - b["t"]) ** 2).sum() + 0.1 * jnp.sum(p["a"] ** 2)
    return squares, {"hits": hits.sum(), "at": hits}


def standardized(p, b):
    x = (b["x"] - b["x"].mean(0)) / b["x"].std(0)
    return losses(p, {**b, "x": x}).mean(), {"tokens": b["mask"].sum()}


def frozen_first_layer(p, b):
    h = jnp.tanh(jnp.ones((len(b["x"]), 4)) @ p["a"])
    launcher.mark_pipeline_boundary()
    h = jnp.tanh(h @ p["b"])
    launcher.mark_pipeline_boundary()
    return jnp.mean((h @ p["c"] - b["t"]) ** 2), {}


def contrastive(p, b):
    return -jnp.diag(jax.nn.log_softmax(net(p, b) @ b["t"].T)).mean(), {}


def batch_norm(p, b):
    h = net(p, b)
    return jnp.mean((h - h.mean(0)) / (h.std(0) + 0.1) * b["t"]), {"std": h.std(0)}


EQUAL = [masked, decayed, standardized, frozen_first_layer]
JOINED = [contrastive, batch_norm]
TWO_STAGES = launcher.UniformStageOption(2, logical_mesh_shape=(1, 2))
METHODS = {
    "data": launcher.DataParallel(),
    "data_micro": launcher.DataParallel(num_micro_batches=2),
    "zero3": launcher.Zero3Parallel(num_micro_batches=2),
    "shard": launcher.ShardParallel(num_micro_batches=2, logical_mesh_shape=(2, 2)),
    "stages": launcher.PipeshardParallel(
        num_micro_batches=2,
        stage_option=launcher.ManualStageOption(
            forward_stage_layer_ids=[[0], [1, 2]],
            submesh_shapes=[(1, 2), (1, 2)],
            logical_mesh_shapes=[(2, 1), (2, 1)],
        ),
    ),
    "auto": launcher.PipeshardParallel(num_micro_batches=None, stage_option="auto"),
}
ONE_SLICE = {
    "data": METHODS["data"],
    "zero3": launcher.Zero3Parallel(),
    "auto": METHODS["auto"],
    "shard": launcher.ShardParallel(logical_mesh_shape=(1, 4)),
    "stages": launcher.PipeshardParallel(stage_option=TWO_STAGES),
}
DEFAULT = {
    ("masked", "stages"),
    ("masked", "auto"),
    ("decayed", "data_micro"),
    ("contrastive", "auto"),
}


def cases(losses, methods):
    return [
        pytest.param(
            of,
            methods[name],
            marks=[] if (of.__name__, name) in DEFAULT else [pytest.mark.stress],
            id=f"{of.__name__}-{name}",
        )
        for of, name in itertools.product(losses, methods)
    ]


def step_of(of, value_and_grad):
    def step(params, batch):
        found, grads = value_and_grad(of, has_aux=True)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), found

    return step


def trained(step):
    params, history = jax.tree.map(jnp.asarray, PARAMS), []
    for k in range(ROUNDS):
        batch = {**BATCH, "x": BATCH["x"] + k / 4}
        params, found = step(params, batch)
        history.append(jax.tree.map(np.asarray, found))
    return params, history


def check(of, method):
    by_plan = launcher.parallelize(
        step_of(of, launcher.value_and_grad), method=method, devices=jax.devices()[:4]
    )
    got, want = trained(by_plan), trained(jax.jit(step_of(of, jax.value_and_grad)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.parametrize(("of", "method"), cases(EQUAL, METHODS))
def test_training_is_that_of_one_device(of, method):
    check(of, method)


@pytest.mark.parametrize(("of", "method"), cases(JOINED, ONE_SLICE))
def test_examples_that_see_one_another_in_one_slice(of, method):
    check(of, method)


def test_a_plan_says_that_no_batch_is_cut():
    step = launcher.parallelize(
        step_of(contrastive, launcher.value_and_grad),
        method=METHODS["data"],
        devices=jax.devices()[:4],
    )
    plan = step.plan(PARAMS, BATCH)
    assert [stage.logical_mesh for stage in plan.stages] == [(1, 4)]
    assert re.fullmatch(
        r"devices share the whole batch instead of cutting it into replicas, since dot_general at "
        r".*test_meaning\.py:\d+.* joins examples",
        plan.notes[0],
    )


@pytest.mark.parametrize("of", JOINED)
def test_examples_that_see_one_another_are_refused_in_several(of):
    step = step_of(of, launcher.value_and_grad)
    for method in (METHODS["data_micro"], METHODS["stages"]):
        with pytest.raises(BatchError, match=r"at .*test_meaning.py:\d+.* joins examples"):
            launcher.parallelize(step, method=method, devices=jax.devices()[:4])(PARAMS, BATCH)


def test_the_whole_batch_sum_is_computed_once():
    """The masks are added up before the pipeline, by none of its tasks."""
    step = launcher.parallelize(
        step_of(masked, launcher.value_and_grad),
        method=METHODS["stages"],
        devices=jax.devices()[:4],
    )
    loss = step.plan(PARAMS, BATCH).loss
    assert re.fullmatch(
        r"sum over the examples; computed on the whole batch: reduce_sum at .*test_meaning\.py.*",
        loss,
    )
    texts = step.executable(PARAMS, BATCH).hlo_text()
    sums = [
        name for name, text in texts.items() if re.search(r"\{\(f32\[\d\]\{0\}\)->f32\[\]", text)
    ]
    assert sums == ["before.0"]
