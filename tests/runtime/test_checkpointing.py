"""Checkpointing: a stage holds its layers' inputs, and recomputes one layer at a time."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.gpt.model import build

WIDTH, ROWS, LAYERS = 64, 512, 24
FEW = 4  # layers of what is only to be equal
REMATS = "none", "selective", "full"
IN_PARTS = "full/4", "full:12"  # of some layers together, and of some layers alone


def init(layers=LAYERS):
    rng, shapes = np.random.default_rng(0), ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    return [
        [(rng.normal(size=shape) / shape[0]).astype(np.float32) for shape in shapes]
        for _ in range(layers)
    ]


def loss(params, x):
    for i, (up, down) in enumerate(params):
        if i:
            launcher.mark_pipeline_boundary()
        x = x + jnp.tanh(jax.nn.gelu(x @ up) @ down)
    return (x**2).mean()


def step(params, x):
    value, grads = launcher.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def step_of_jax(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


BATCH = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)


def made(method, devices=1, of=step):
    return launcher.parallelize(
        of, method=method, devices=jax.devices()[:devices], donate_argnums=()
    )


class Compiled(NamedTuple):
    """One stage's passes: bytes of what they compute, with what is left between them; the same as
    it is predicted; and operations."""

    bytes: int
    predicted_bytes: int
    flops: float


@functools.cache
def compiled(remat, layers=LAYERS):
    return measured(step, remat, init(layers), BATCH)


def measured(step, remat, params, batch):
    executable = made(launcher.DataParallel(remat=remat), of=step).executable(params, batch)
    programs = [one for name, one in executable._compiled.items() if name.startswith("stage")]
    gradients = sum(w.size * 4 for w in jax.tree.leaves(params))
    said = [one.memory_analysis() for one in programs]
    between = sum(one.output_size_in_bytes for one in said) - gradients
    given = 2 * gradients + sum(x.nbytes for x in jax.tree.leaves(batch))
    return Compiled(
        bytes=between + max(one.temp_size_in_bytes for one in said),
        predicted_bytes=executable.plan.stages[0].memory_bytes - given,
        flops=sum(one.cost_analysis()["flops"] for one in programs),
    )


@pytest.mark.slow
def test_the_only_stage_holds_the_inputs_of_its_layers_and_one_layer():
    inputs, one = (LAYERS - 1) * BATCH.nbytes, compiled("none", layers=1)  # the batch is there
    assert compiled("full").bytes == pytest.approx(inputs + one.bytes, rel=0.1)
    assert compiled("full").bytes < compiled("selective").bytes < compiled("none").bytes


@pytest.mark.slow
def test_some_layers_together_hold_fewer_inputs_and_more_layers_at_once():
    """Of four: six inputs, and four layers; the fewer are computed again, the less is saved."""
    four = compiled("none", layers=4)
    assert compiled("full/4").bytes == pytest.approx(5 * BATCH.nbytes + four.bytes, rel=0.1)
    assert compiled("full").bytes < compiled("full:12").bytes < compiled("none").bytes


@pytest.mark.slow
@pytest.mark.parametrize("remat", [*REMATS, *IN_PARTS])
def test_the_estimate_is_within_a_tenth(remat):
    assert compiled(remat).predicted_bytes == pytest.approx(compiled(remat).bytes, rel=0.1)


def cost(remat):
    """Operations, as a multiple of those without computing again."""
    return compiled(remat).flops / compiled("none").flops


@pytest.mark.slow
def test_computing_again_costs_a_third():
    """Counted in operations."""
    assert 1.3 < cost("full") <= 1.36
    assert 1.0 < cost("selective") < 1.05


@pytest.mark.slow
def test_computing_some_layers_again_costs_their_share():
    assert 1.3 < cost("full/4") <= 1.36
    assert cost("full:12") == pytest.approx((1 + cost("full")) / 2, rel=0.02)


def gpt(remat, blocks=5, rows=8, length=128):
    sizes = {"num_heads": 4, "hidden_size": WIDTH, "vocab_size": 64, "sequence_length": length}
    model = build(GPTOptions(size=None, num_layers=blocks, **sizes).filled(), "fp32")

    def step(params, batch):
        (value, _), grads = launcher.value_and_grad(model.loss, has_aux=True)(params, batch, None)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
    tokens = np.zeros((rows, length), np.int32)
    return measured(step, remat, params, {"tokens": tokens, "targets": tokens})


@pytest.mark.slow
def test_a_stage_of_a_gpt_holds_the_inputs_of_its_blocks_and_one_block():
    """And no causal masks."""
    full, selective, none = found = [gpt(remat) for remat in ("full", "selective", "none")]
    inputs = (5 - 1) * 8 * 128 * WIDTH * 4
    assert full.bytes == pytest.approx(inputs + gpt("none", blocks=1).bytes, rel=0.1)
    assert full.bytes < selective.bytes < none.bytes
    for each in found:
        assert each.predicted_bytes == pytest.approx(each.bytes, rel=0.12)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("method", "devices"),
    [
        (launcher.DataParallel(num_micro_batches=2, remat="full"), 2),
        (launcher.DataParallel(remat="selective"), 1),
        (launcher.DataParallel(remat="full/3"), 1),
        (launcher.Zero3Parallel(remat="full"), 2),
        (
            launcher.ThreeDParallel(
                pipeline=2, num_micro_batches=2, remat=("full:1+selective", "full:1")
            ),
            2,
        ),
    ],
    ids=["data", "selective", "by_three", "zero3", "stages"],
)
def test_training_is_that_of_one_device(method, devices):
    check_training(method, devices, FEW)


def check_training(method, devices, layers):
    run, plain = made(method, devices), jax.jit(step_of_jax)
    got = want = init(layers)
    for _ in range(2):
        (got, a), (want, b) = run(got, BATCH), plain(want, BATCH)
        np.testing.assert_allclose(jax.device_get(a), b, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(jax.device_get(got)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class InMemory(NamedTuple):
    """The search's plan for devices of so many bytes."""

    memory_bytes: int

    def plan(self, step, cluster):
        method = launcher.PipeshardParallel(1, stage_option="auto", schedule="auto", remat="auto")
        return method.plan(step, dataclasses.replace(cluster, memory_bytes=self.memory_bytes))


def test_the_search_computes_as_few_layers_again_as_fit():
    """Where all layers fit only if they are computed again, some suffice, and that is faster."""
    none, full = (
        made(launcher.DataParallel(remat=remat)).plan(init(8), BATCH) for remat in ("none", "full")
    )
    most, least = (plan.stages[0].memory_bytes for plan in (none, full))
    method = InMemory((most + least) // 2)
    plan = made(method).plan(init(8), BATCH)
    assert plan.stages[0].remat in {f"full:{n}" for n in range(1, 8)}
    assert least < plan.stages[0].memory_bytes <= method.memory_bytes < most
    assert plan.predicted_step_seconds < full.predicted_step_seconds
    check_training(method, 1, layers=8)
