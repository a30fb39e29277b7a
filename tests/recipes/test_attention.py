"""Which models take cuDNN's attention, and on which devices."""

import dataclasses

import jax
import numpy as np
import pytest
from filled import filled_params

from launcher.cluster.kinds import kind_of
from launcher.config.compose import load
from launcher.driver.planning.plan_from_config import plan_of
from launcher.recipes import InputError, build_model
from launcher.recipes.models.attention import with_attention
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.llama import LlamaOptions
from launcher.recipes.models.vit import ViTOptions
from launcher.trace.ir.cudnn import described_cudnn
from launcher.train.program import build_program

SIZES = {
    "vocab_size": 32, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "sequence_length": 16,
}  # fmt: skip
OPTIONS = {
    "gpt": GPTOptions(**SIZES).filled(),
    "llama": LlamaOptions(**SIZES, num_kv_heads=2).filled(),
}
HAVE_IT = (8.0, 8.6, 8.9, 9.0, 10.0, 12.0)
LACK_IT = (None, 7.0, 7.5)  # None: a CPU, or a GPU of which it is not known


@pytest.mark.parametrize("name", OPTIONS)
def test_auto_takes_it_where_the_devices_have_it(name):
    chosen = {k: with_attention(OPTIONS[name], "bf16", k).attention for k in HAVE_IT + LACK_IT}
    assert chosen == dict.fromkeys(HAVE_IT, "cudnn") | dict.fromkeys(LACK_IT, "xla")


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({}, "fp32"),
        ({"dropout": 0.1}, "bf16"),
        ({"hidden_size": 36}, "bf16"),
        ({"sequence_length": 15}, "bf16"),
    ],
    ids=["fp32", "dropout", "head", "odd length"],
)
def test_auto_leaves_it_where_the_model_cannot_use_it(changes, precision):
    options = dataclasses.replace(OPTIONS["gpt"], **changes)
    assert with_attention(options, precision, HAVE_IT[0]).attention == "xla"
    asked = dataclasses.replace(options, attention="cudnn")
    with pytest.raises(
        InputError,
        match=r"model.attention=cudnn .*(bf16|dropout|heads|an even number of positions, not 15)",
    ):
        build_model(asked, precision, HAVE_IT[0])


def test_a_vision_transformer_whose_positions_are_odd_is_left_to_xla():
    sizes = {"num_classes": 4, "num_layers": 2, "num_heads": 4, "hidden_size": 32}
    even, odd = (ViTOptions(size=None, patch_size=4, image_size=n, channels=3, **sizes)
                 for n in (20, 16))  # fmt: skip
    chosen = [with_attention(one, "bf16", HAVE_IT[0]).attention for one in (even, odd)]
    assert chosen == ["cudnn", "xla"]


def test_what_the_devices_lack_is_named():
    asked = dataclasses.replace(OPTIONS["gpt"], attention="cudnn")
    with pytest.raises(
        InputError, match=r"cudnn needs .* capability 8.0 or more, and these have 7.5"
    ):
        build_model(asked, "bf16", 7.5)
    build_model(asked, "bf16", None)


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_model_computes_the_same_by_both(name):
    """On CPUs, to what 16 bits tell apart."""
    tokens = np.random.default_rng(0).integers(32, size=(4, 17)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    def trained(attention):
        options = dataclasses.replace(OPTIONS[name], attention=attention)
        model = build_model(options, "bf16")
        with described_cudnn():
            params = filled_params(model, std=0.02)
            both = jax.value_and_grad(model.loss, has_aux=True)
            return jax.jit(both)(params, batch, None)

    ((got, _), slopes), ((want, _), expected) = trained("cudnn"), trained("xla")
    assert float(got) == pytest.approx(float(want), abs=1e-2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-2), slopes, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param("model=llama model.size=llama3_1b", marks=pytest.mark.stress),
        "model=gpt model.size=1.3b",
    ],
)
def test_a_billion_parameters_at_8192_tokens_use_a_third_of_eight_h100(model):
    words = f"{model} model.sequence_length=8192 train.precision=bf16 cluster=h100_8"
    config = load([*words.split(), "dataset=synthetic", "task=plan"])
    cluster = kind_of(config.cluster).shape(None)

    program = build_program(config, cluster.compute_capability)
    plan = plan_of(config.parallel, program.train, cluster)
    assert plan.predicted_tflops_per_device * 1e12 / cluster.peak_flops >= 0.35
