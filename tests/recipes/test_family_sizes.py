"""A size of a family has the parameters of its name, and a plan."""

import dataclasses
import math

import jax
import pytest

from launcher.config.compose import load
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.planning.prepare import shape_of
from launcher.recipes import build_model
from launcher.train.program import build_program

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
        "llama2_7b": 6.74, "llama2_13b": 13.02, "llama2_70b": 68.98, "llama3_1b": 1.24,
        "llama3_3b": 3.21, "llama3_8b": 8.03, "llama3_70b": 70.55, "llama3_405b": 405.85,
        "qwen2.5_0.5b": 0.494, "qwen2.5_1.5b": 1.54, "qwen2.5_3b": 3.09, "qwen2.5_7b": 7.62,
        "qwen2.5_14b": 14.77, "qwen2.5_32b": 32.76, "qwen2.5_72b": 72.71, "qwen3_0.6b": 0.596,
        "qwen3_1.7b": 1.72, "qwen3_4b": 4.02, "qwen3_8b": 8.19, "qwen3_14b": 14.77,
        "qwen3_32b": 32.76, "mistral_7b": 7.24, "gemma_2b": 2.51, "gemma_7b": 8.54,
        "mpt_7b": 6.65, "mpt_30b": 29.96,
    },
}  # fmt: skip


def named(size):
    """The parameters that a name says, and half a unit of its last digit."""
    number, unit = size[:-1], {"m": 1e-3, "b": 1.0}[size[-1]]
    digits = len(number.partition(".")[2])
    return float(number) * unit, 0.5 * 10.0**-digits * unit


def count(options):
    """Thousand millions of parameters."""
    model = build_model(options, "fp32")
    made = jax.eval_shape(model.init, jax.random.key(0))
    params = made[0] if model.has_state else made
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) / 1e9


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("family", "size"), [(f, s) for f, sizes in SIZES.items() for s in sizes])
def test_a_size_has_the_parameters_of_its_name(family, size):
    said = SIZES[family][size]
    want, slack = (said, 0.0) if said else named(size)
    options = load([f"model={family}", f"model.size={size}", "dataset=synthetic"]).model
    if family in ("resnet", "wide_resnet"):
        found = count(options)
    else:  # layers, or pairs of them, are alike: two shallow models tell
        few, more = (count(dataclasses.replace(options, num_layers=n)) for n in (2, 4))
        found = few + (more - few) / 2 * (options.layers - 2)
    assert abs(found - want) <= max(0.02 * want, slack)


# By the most parameters, in thousand millions: 16 bytes each, and room for activations.
CLUSTERS = {"h100_8": 15, "h100_8_x16": 150, "h100_8_x128": math.inf}


def cluster_for(params):
    """The smallest named cluster of 80 GB devices that so many thousand millions ask for."""
    return next(name for name, most in CLUSTERS.items() if params <= most)


@pytest.mark.stress
@pytest.mark.parametrize(("family", "size"), [(f, s) for f, sizes in SIZES.items() for s in sizes])
def test_a_size_has_a_plan_on_a_cluster_that_fits_it(family, size):
    cluster = cluster_for(SIZES[family][size] or named(size)[0])
    words = [f"model={family}", f"model.size={size}", "dataset=synthetic", f"cluster={cluster}"]
    words += ["train.precision=bf16", "train.global_batch_size=512", "train.eval_every=0"]
    words += ["model.scan_layers=true"] if family in ("gpt", "llama") else []
    config = load([*words, "task=plan", "parallel=auto"])
    shape = shape_of(config, None, None)
    plan = plan_of(config.parallel, build_program(config, shape.compute_capability).train, shape)
    assert plan.missing_bytes <= 0
    assert plan.num_devices == shape.num_devices
