"""Every method computes, with every model, what plain `jax.jit` computes on one device.

A few pairs that cover all methods run by default; the rest is slow.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import launcher
from launcher.config.schema import GPT, MLP
from launcher.plan import local_shape
from launcher.plan.methods import (
    DataParallel,
    ManualStageOption,
    PipeshardParallel,
    ShardParallel,
    ThreeDParallel,
    UniformStageOption,
    Zero2Parallel,
    Zero3Parallel,
)
from launcher.plan.sharding.names import leaf_names
from launcher.runtime import compile_step
from launcher.trace import trace_step
from recipes import build_model

ROWS, ROUNDS = 24, 5
SMALL = {
    "vocab_size": 32, "hidden_size": 16, "num_layers": 4, "num_heads": 4, "sequence_length": 8,
    "mlp_ratio": 2,
}  # fmt: skip
MODELS = {
    "mlp": MLP(input_size=8, hidden_size=16, output_size=4, num_layers=4),
    "gpt_tied": GPT(**SMALL, tie_embeddings=True),
    "gpt_untied": GPT(**SMALL, tie_embeddings=False),
}
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 8), eps=1e-4)
)


def manual(num_micro_batches, stages, submeshes, logical=None, options=None, **other):
    option = ManualStageOption(stages, submeshes, logical, options)
    return PipeshardParallel(num_micro_batches, stage_option=option, **other)


def uniform(num_micro_batches, stages, **other):
    option = UniformStageOption(stages)
    return PipeshardParallel(num_micro_batches, stage_option=option, **other)


def by_hand(step, axes):
    """Specs for every argument: the last dimension along one axis and the first one along another,
    where they divide; not as any method would have it."""
    first, last = axes
    found = {}
    for name, var in zip(leaf_names(step), step.invars, strict=True):
        shape = var.aval.shape
        spec = [None] * len(shape)
        if shape and shape[-1] % 2 == 0:
            spec[-1] = last
        if len(shape) > 1 and shape[0] % 2 == 0:
            spec[0] = first
        found[name] = tuple(spec)
    return found


TWO, FOUR = [[0, 1], [2, 3]], [[0], [1], [2], [3]]


def given_specs(step):
    options = [by_hand(step, ("data", "model")), by_hand(step, ("model", None))]
    return manual(2, TWO, [(1, 4), (1, 2)], [(2, 2), (1, 2)], options)


# name: (devices, method or what makes it for a step)
METHODS = {
    **{f"shard 4, {m}": (4, ShardParallel(m)) for m in (1, 2)},
    **{f"shard 2x2, {m}": (4, ShardParallel(m, (2, 2))) for m in (1, 2)},
    **{f"data, {m}": (4, DataParallel(m)) for m in (1, 2)},
    **{f"zero2, {m}": (4, Zero2Parallel(m)) for m in (1, 2)},
    **{f"zero3, {m}": (4, Zero3Parallel(m)) for m in (1, 2)},
    "zero3, remat": (4, Zero3Parallel(2, remat="full")),
    "3d": (8, ThreeDParallel(2, 2, 2, num_micro_batches=3)),
    "3d, remat": (8, ThreeDParallel(2, 2, 2, 2, schedule="gpipe", remat="full")),
    "3d, zero bubble": (8, ThreeDParallel(2, 2, 2, 2, schedule="zero_bubble")),
    "2 stages": (2, uniform(4, 2)),
    "4 stages": (4, uniform(6, 4)),
    "4 stages on 2 meshes": (4, uniform(3, 4, schedule="interleaved_1f1b")),
    "1+3": (4, manual(2, TWO, [(1, 1), (1, 3)])),
    "1+3, whole": (4, manual(1, TWO, [(1, 1), (1, 3)])),
    "3+1, remat": (4, manual(2, TWO, [(1, 3), (1, 1)], remat="dots_saveable")),
    "2+4": (6, manual(3, TWO, [(1, 2), (1, 4)], [(2, 1), (1, 4)])),
    "2+4, zero3": (6, manual(3, TWO, [(1, 2), (1, 4)], [(2, 1), (2, 2)], ["zero3", "zero3"])),
    "2+4, zero2": (6, manual(2, TWO, [(1, 2), (1, 4)], [(2, 1), (4, 1)], ["zero2", "zero2"])),
    "1+2+4+1": (8, manual(4, FOUR, [(1, 1), (1, 2), (1, 4), (1, 1)],
                          [(1, 1), (1, 2), (2, 2), (1, 1)])),
    "given": (6, given_specs),
}  # fmt: skip
FAST = {
    ("mlp", "shard 4, 1"),
    ("mlp", "data, 2"),
    ("mlp", "zero2, 2"),
    ("mlp", "zero3, 1"),
    ("mlp", "3d"),
    ("mlp", "4 stages"),
    ("mlp", "1+3"),
    ("mlp", "1+3, whole"),
    ("mlp", "2+4, zero2"),
    ("mlp", "given"),
    ("gpt_tied", "2+4, zero3"),
    ("gpt_untied", "shard 2x2, 2"),
}


@functools.cache
def training(name):
    """A model's step (with either `value_and_grad`), first state and batches."""
    options = MODELS[name]
    model = build_model(options, "fp32")

    def init(key):
        params = model.init(key)
        return {"params": params, "opt": OPTIMIZER.init(params), "step": jnp.int32(0)}

    def step(state, batch):
        (loss, _), grads = launcher.value_and_grad(
            lambda p: model.loss(p, batch, None), has_aux=True
        )(state["params"])
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = {"params": params, "opt": opt, "step": state["step"] + 1}
        return new, {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    rng = np.random.default_rng(0)
    if options.name == "mlp":
        xs = [rng.normal(size=(ROWS, options.input_size)).astype(np.float32) for _ in range(ROUNDS)]
        return step, init, [{"x": x, "y": x[:, : options.output_size] ** 2} for x in xs]
    size = ROWS, options.sequence_length + 1
    texts = [rng.integers(0, options.vocab_size, size).astype(np.int32) for _ in range(ROUNDS)]
    return step, init, [{"tokens": x[:, :-1], "targets": x[:, 1:]} for x in texts]


def run(step, state, batches):
    history = []
    for batch in batches:
        state, metrics = step(state, batch)
        history.append(jax.device_get(metrics))
    return jax.device_get(state), history


@functools.cache
def serial(name):
    """Outside of `parallelize`, `launcher.value_and_grad` is JAX's own."""
    step, init, batches = training(name)
    return run(jax.jit(step), jax.jit(init)(jax.random.key(0)), batches)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(*pair, marks=[] if pair in FAST else [pytest.mark.slow])
        for pair in itertools.product(MODELS, METHODS)
    ],
)
def test_parity(name, method):
    step, init, batches = training(name)
    devices, how = METHODS[method]
    traced = trace_step(step, (jax.eval_shape(init, jax.random.key(0)), batches[0]))
    how = how(traced) if callable(how) else how
    plan = how.plan(traced, local_shape(devices, 1, "cpu"))
    plan.validate(traced)
    executable = compile_step(traced, plan, jax.devices())
    got = run(executable, executable.create(init, jax.random.key(0)), batches)
    jax.tree.map(close, got, serial(name))


def close(a, b):
    """To 1e-5 of the largest entry: where entries cancel, only that is known of a sum."""
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(b).max(initial=0)))
