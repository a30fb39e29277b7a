"""Packed rows in the models: a document's loss is what it is alone in a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import filled_params

import launcher
from launcher.recipes import build_model
from launcher.recipes.models.bert import BERTOptions
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.llama import LlamaOptions
from launcher.recipes.models.moe import MoEOptions

SHAPE = {
    "vocab_size": 32, "num_layers": 2, "num_heads": 2, "hidden_size": 16, "sequence_length": 12,
}  # fmt: skip
LENGTHS = (5, 3, 4)
EXPERTS = {"num_experts": 4, "mlp_size": 8, "capacity_factor": 0.0, "group_size": 1}


def options_of(family, scan=False):
    match family:
        case "gpt":
            return GPTOptions(size=None, **SHAPE, scan_layers=scan).filled()
        case "llama":
            return LlamaOptions(**SHAPE, scan_layers=scan).filled()
        case "moe":
            return MoEOptions(**SHAPE, **EXPERTS, scan_layers=scan).filled()
    return BERTOptions(**SHAPE).filled()


def packed(rng, rows=1):
    one = {
        "segments": np.repeat(np.arange(len(LENGTHS)), LENGTHS),
        "positions": np.concatenate([np.arange(n) for n in LENGTHS]),
    }
    ends = np.cumsum(LENGTHS)[:-1] - 1
    weights = np.ones(sum(LENGTHS), np.float32)
    weights[ends] = 0
    one["weights"] = weights
    batch = {
        k: jnp.asarray(np.tile(v, (rows, 1)), jnp.float32 if k == "weights" else jnp.int32)
        for k, v in one.items()
    }
    batch |= {
        name: jnp.asarray(rng.integers(32, size=(rows, sum(LENGTHS))), jnp.int32)
        for name in ("tokens", "targets")
    }
    return batch


@pytest.mark.devices
@pytest.mark.sampled(3)
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("family", ["gpt", "llama", pytest.param("moe", marks=pytest.mark.slow)])
def test_a_documents_loss_is_what_it_is_alone(family, scan):
    model = build_model(options_of(family, scan), "fp32")
    params, compiled = filled_params(model), jax.jit(model.loss)
    batch = packed(np.random.default_rng(0))
    loss, metrics = compiled(params, batch, None)
    assert float(metrics["weight"]) == sum(LENGTHS) - len(LENGTHS) + 1
    total, start = 0.0, 0
    for index, length in enumerate(LENGTHS):
        counted = (
            length if index == len(LENGTHS) - 1 else length - 1
        )  # the last target is another's
        alone = {k: batch[k][:, start : start + length] for k in ("tokens", "targets", "weights")}
        total += float(compiled(params, alone, None)[0]) * counted
        start += length
    np.testing.assert_allclose(float(loss), total / float(metrics["weight"]), rtol=1e-6)


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["bert", "llama", "moe", "gpt"])
def test_packed_rows_train_the_same_in_a_pipeline_of_microbatches(family):
    """The rows' weights differ: the mean is over all of the batch, not over microbatches."""
    model = build_model(options_of(family), "fp32")
    batch = packed(np.random.default_rng(1), rows=4)
    batch["weights"] = batch["weights"].at[0].set(0.0)
    params = filled_params(model)

    def step(params, batch):
        (loss, _), grads = launcher.value_and_grad(model.loss, has_aux=True)(params, batch, None)
        return jax.tree.map(lambda w, g: w - g, params, grads), loss

    method = launcher.PipeshardParallel(2, stage_option=launcher.UniformStageOption(2))
    parallel = launcher.parallelize(
        step, method=method, batch_argnums=(1,), donate_argnums=(), devices=jax.devices()[:2]
    )
    (new, loss), (wanted, alone) = parallel(params, batch), jax.jit(step)(params, batch)
    np.testing.assert_allclose(loss, alone, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), new, wanted)
