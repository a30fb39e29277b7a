"""Every family: it learns from made-up data, trains under plans as on one device, and has its size.

What a family's tests need is its tiny settings here; the rest is asked of all of them alike.
"""

import functools
import math
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import optax
import pytest

import launcher
from launcher.config.compose import load
from launcher.plan import local_shape
from launcher.plan.auto_plan import auto_plans
from launcher.runtime import compile_step
from launcher.trace import trace_step
from launcher.train.step import init_state, make_train_step
from recipes import build_dataset, build_model
from recipes.synthetic_options import Synthetic

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
import cases

ROWS, STEPS = cases.BATCH, 3
_TEXT = "vocab_size=32 sequence_length=8 num_layers=2 num_heads=2 hidden_size=16"
TINY = {
    "llama": f"{_TEXT} num_kv_heads=1",
    "moe": f"{_TEXT} num_experts=4 mlp_size=16 capacity_factor=1",
    "moe_dropless": f"{_TEXT} num_experts=4 mlp_size=16 capacity_factor=0 shared_size=8",
}
_PICTURES = "image_size=8 channels=2"
TINY |= {
    "bert": f"{_TEXT} mask_every=4",
    "vit": f"{_PICTURES} num_classes=4 patch_size=4 num_layers=2 num_heads=2 hidden_size=16",
    "resnet": f"{_PICTURES} num_classes=4 depth=10 width=4",
    "wide_resnet": f"{_PICTURES} num_classes=4 depth=50 width=2 width_factor=2",
    "unet": f"{_PICTURES} width=8 levels=2 blocks=1",
    "toy": "hidden_size=16",
}
METHODS = {
    "manual": (launcher.PipeshardParallel(num_micro_batches=2).plan, 2),
    "zero3": (launcher.Zero3Parallel().plan, 2),
    "three_d": (
        launcher.ThreeDParallel(data=1, model=2, pipeline=2, num_micro_batches=2).plan,
        4,
    ),
    "auto": (lambda step, shape: auto_plans(step, shape, 2, "1f1b", "none", "model")[0], 4),
}
OPTIMIZER = optax.adam(1e-2, eps=1e-3)


def options_of(name, words=""):
    family = "moe" if name.startswith("moe") else name
    settings = [f"model.{word}" for word in f"{TINY[name]} {words}".split()]
    return load([f"model={family}", *settings, "dataset=synthetic"]).model


@functools.cache
def training(name):
    """A train step, `init(key)` of its state, and batches."""
    options = options_of(name)
    model = build_model(options, "fp32")
    data = build_dataset(Synthetic(num_samples=64), options, ROWS, seed=0)
    step = make_train_step(model, OPTIMIZER, lambda count: 1e-2)
    init = functools.partial(init_state, model, OPTIMIZER)
    return step, init, [data.train(k) for k in range(STEPS)]


def key():
    return np.asarray(jax.random.key_data(jax.random.key(0)))


def run(step, state, batches):
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return jax.device_get(state.model), losses


@functools.cache
def on_one_device(name, slices):
    """A training by plain `jax.jit`; batch statistics and noise are those of so many slices."""
    step, init, batches = training(name)
    over = functools.partial(cases._over_slices, slices)
    with mock.patch.object(launcher, "value_and_grad", over, create=True):
        return run(jax.jit(step), jax.jit(init)(key()), batches)


DEEP = "wide_resnet"  # whose bottlenecks begin at 16 blocks
FAST = {("moe", "manual"), ("toy", "manual")}
BY_SLICE = {"resnet", "wide_resnet", "unet", "toy"}


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[] if (name, method) in FAST else [mark])
        for k, name in enumerate(TINY)
        for m, method in enumerate(METHODS)
        for mark in [pytest.mark.stress if (k + m) % 5 or name == DEEP else pytest.mark.slow]
    ],
)
def test_it_trains_as_on_one_device(name, method):
    step, init, batches = training(name)
    how, devices = METHODS[method]
    traced = trace_step(step, (jax.eval_shape(init, key()), batches[0]))
    plan = how(traced, local_shape(devices, 1, "cpu"))
    executable = compile_step(traced, plan, jax.devices())
    got = run(executable, executable.create(init, key()), batches)
    slices = plan.num_micro_batches * plan.num_replicas if name in BY_SLICE else 1
    want = on_one_device(name, slices)

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(b).max())))

    jax.tree.map(close, got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in TINY if n not in ("llama", "moe_dropless", DEEP)])
def test_its_loss_falls_on_made_up_data(name):
    options = options_of(name)
    model = build_model(options, "fp32")
    data = build_dataset(Synthetic(num_samples=256), options, 16, seed=0)
    optimizer = optax.adam(1e-2)
    step = jax.jit(make_train_step(model, optimizer, lambda count: 1e-2))
    state = jax.jit(functools.partial(init_state, model, optimizer))(key())
    losses = []
    for k in range(40):
        state, metrics = step(state, data.train(k))
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-5:]) < 0.96 * np.mean(losses[:5])


SIZES = {  # parameters in thousand millions where the name does not say it
    "bert": {"base": 0.110, "large": 0.335},  # Devlin et al. (2019): 110 M, 340 M with its pooler
    "vit": {"small": 0.0221, "base": 0.0866, "large": 0.3044},
    "resnet": {
        "resnet18": 0.0117, "resnet34": 0.0218, "resnet50": 0.0256, "resnet101": 0.0445,
        "resnet152": 0.0602,
    },
    "wide_resnet": dict.fromkeys(("250m", "500m", "1b", "2b", "4b", "6.8b", "13b")),
    "gpt": dict.fromkeys(
        ("125m", "350m", "760m", "1.3b", "2.6b", "6.7b", "15b", "39b", "76b")
    ),
    "moe": dict.fromkeys(("380m", "690m", "1.3b", "2.4b", "10b", "27b", "70b"))
    | {"mixtral_8x7b": 46.7, "qwen3_30b_a3b": 30.5, "qwen3_235b_a22b": 235.1},
    "llama": {  # as their publishers count
        "llama2_7b": 6.74, "llama2_13b": 13.0, "llama2_70b": 69.0, "llama3_1b": 1.24,
        "llama3_3b": 3.21, "llama3_8b": 8.03, "llama3_70b": 70.6, "llama3_405b": 405.9,
        "qwen2.5_0.5b": 0.494, "qwen2.5_7b": 7.62, "qwen2.5_72b": 72.7, "qwen3_0.6b": 0.596,
        "qwen3_8b": 8.19, "qwen3_32b": 32.8, "mistral_7b": 7.24, "gemma_2b": 2.51,
        "gemma_7b": 8.54, "mpt_7b": 6.65, "mpt_30b": 29.95,
    },
}  # fmt: skip


def named(size):
    """The parameters that a name says, and half a unit of its last digit."""
    number, unit = size[:-1], {"m": 1e-3, "b": 1.0}[size[-1]]
    digits = len(number.partition(".")[2])
    return float(number) * unit, 0.5 * 10.0**-digits * unit


def count(family, size, words):
    """Thousand millions of parameters; of a deep model by two depths, since layers are alike."""
    options = load([f"model={family}", f"model.size={size}", *words, "dataset=synthetic"]).model
    model = build_model(options, "fp32")
    made = jax.eval_shape(model.init, jax.random.key(0))
    params = made[0] if model.has_state else made
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) / 1e9


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("family", "size"), [(f, s) for f, sizes in SIZES.items() for s in sizes])
def test_a_size_has_the_parameters_of_its_name(family, size):
    said = SIZES[family][size]
    want, slack = (said, 0.0) if said else named(size)
    if family in ("resnet", "wide_resnet"):
        found = count(family, size, [])
    else:  # layers, or pairs of them, are alike: two shallow ones tell
        layers = load([f"model={family}", f"model.size={size}", "dataset=synthetic"]).model.layers
        few, more = (count(family, size, [f"model.num_layers={n}"]) for n in (2, 4))
        found = few + (more - few) / 2 * (layers - 2)
    assert abs(found - want) <= max(0.02 * want, slack)
