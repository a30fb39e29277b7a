"""`recipes/models/llama/model.py`: layers, loss, positions, windows, shared heads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import filled_params
from whole_logits import whole_logits

from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.recipes import build_model
from launcher.recipes.models.llama import LlamaOptions
from launcher.recipes.models.llama.model import rotary_frequencies, rotate

pytestmark = pytest.mark.devices
TINY = LlamaOptions(
    size=None, vocab_size=256, sequence_length=16, num_layers=3, num_heads=4, num_kv_heads=2,
    hidden_size=32,
).filled()  # fmt: skip


def build(precision="fp32", **changes):
    return build_model(dataclasses.replace(TINY, **changes), precision)


def random_batch(rows=4, length=16, vocabulary=256):
    tokens = np.random.default_rng(0).integers(vocabulary, size=(rows, length + 1))
    return {"tokens": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}


def logits_of(options, params, tokens):
    return jax.jit(functools.partial(whole_logits, options))(params, tokens)


def loss_of(model, params, batch):
    return float(jax.jit(model.loss, static_argnums=2)(params, batch, None)[0])


@pytest.mark.parametrize("window", [0, 3])
def test_a_token_reaches_later_logits_only_as_far_as_the_layers_windows(window):
    tokens = random_batch()["tokens"]
    changed = tokens.copy()
    changed[:, 4] = (changed[:, 4] + 1) % 256
    both = np.concatenate([tokens, changed])
    options = dataclasses.replace(TINY, sliding_window=window)
    before, after = np.split(logits_of(options, filled_params(build()), both), 2)
    differs = np.abs(before - after).max((0, 2)) > 0
    reach = 4 + TINY.num_layers * (window - 1) + 1 if window else 16
    np.testing.assert_array_equal(np.flatnonzero(differs), np.arange(4, reach))


def test_scores_of_rotated_heads_depend_on_distances_alone():
    frequencies = rotary_frequencies(8, 100.0)
    query, key = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)).astype("f4")

    def score(i, j):
        turned = [rotate(x, jnp.array([at]), frequencies) for x, at in ((query, i), (key, j))]
        return float((turned[0] * turned[1]).sum())

    assert score(7, 4) == pytest.approx(score(13, 10), rel=1e-5)
    assert score(7, 4) != pytest.approx(score(9, 1), rel=1e-2)
    assert score(5, 5) == pytest.approx(float((query * key).sum()), rel=1e-5)


def test_shared_keys_are_those_of_heads_with_equal_ones():
    tokens = random_batch()["tokens"]
    params = filled_params(build())
    apart = jax.tree.map(jnp.asarray, params)
    for i in range(TINY.num_layers):
        for name in ("linear_k", "linear_v"):
            dense = apart[f"layers_{i}"]["self_attention"][name]
            dense["kernel"] = jnp.repeat(dense["kernel"], 2, axis=1)
    wide = dataclasses.replace(TINY, num_kv_heads=4)
    shared, own = (logits_of(options, p, tokens) for options, p in ((TINY, params), (wide, apart)))
    np.testing.assert_allclose(shared, own, rtol=1e-4, atol=1e-4)


def test_bf16_products_keep_parameters_and_loss_in_fp32():
    model, batch = build("bf16"), random_batch()
    params = filled_params(model)
    both = jax.value_and_grad(model.loss, has_aux=True)
    (loss, _), grads = jax.eval_shape(both, params, batch, None)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves([params, loss, grads])} == {"float32"}
    full = loss_of(build(), params, batch)
    assert loss_of(model, params, batch) == pytest.approx(full, abs=0.02)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.num_kv_heads=3"], "model.num_heads=4 must be a multiple of model.num_kv_heads=3"),
        (["model.head_size=7"], "model.head_size=7 is odd"),
        (["+model.sizes.nano.gated_mlp=3"], "model.sizes.nano.gated_mlp must be true or false"),
        (["+model.sizes.nano.rope_base=x"], "model.sizes.nano.rope_base must be a number, not 'x'"),
        (["+model.sizes.nano.activation=tanh"], "model.activation must be one of silu, gelu"),
        (["model.size=llama3_8"], "There is no model.size=llama3_8"),
    ],
)
def test_settings_that_cannot_be_are_refused(words, message):
    with pytest.raises(ConfigError) as refused:
        load(["model=llama", "dataset=synthetic", *words], [])
    assert message in str(refused.value)


def test_a_size_is_filled_and_a_setting_beats_it():
    found = load(["model=llama", "model.size=qwen3_8b", "model.num_layers=2",
                  "dataset=synthetic"], []).model  # fmt: skip
    assert (found.num_layers, found.head_size, found.head_norm) == (2, 128, True)
    assert (found.tie_embeddings, found.rope_factor, found.mlp_size) == (False, 1.0, 12288)
