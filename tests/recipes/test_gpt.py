"""`gpt`: layers, loss, precision, causality, dropout, and that it learns."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole_logits import whole_logits

from launcher.recipes import build_model
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.gpt.model import GPT
from launcher.recipes.models.llama import LlamaOptions
from launcher.trace.ir.jaxpr import inline_calls, make_jaxpr

pytestmark = pytest.mark.devices
TINY = {
    "vocab_size": 256,
    "sequence_length": 16,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_size": 16,
    "attention": "xla",
}
LLAMA = LlamaOptions(**{**TINY, "num_layers": 3}, num_kv_heads=1).filled()


def build(precision="fp32", **changes):
    return build_model(GPTOptions(**{**TINY, **changes}).filled(), precision)


def random_batch(rows=4, length=16, vocabulary=256):
    tokens = np.random.default_rng(0).integers(vocabulary, size=(rows, length + 1))
    return {"tokens": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}


def init(model):
    return jax.jit(model.init)(jax.random.key(0))


@functools.cache
def tiny_params():
    """Those of `build()`, whatever its precision and dropout."""
    return init(build())


def loss_of(model, params, batch, key=None):
    loss, metrics = jax.jit(model.loss)(params, batch, key)
    assert set(metrics) == ({"accuracy"} if key is None else set())
    return loss


@jax.jit
def logits_of(params, tokens):
    return whole_logits(GPTOptions(**TINY).filled(), params, tokens)


def names_of(params):
    return {
        "/".join(entry.key for entry in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


@pytest.mark.parametrize(
    ("model", "key"),
    [
        (build(num_layers=3, dropout=0.1), None),
        (build(num_layers=3, dropout=0.1), jax.random.key(0)),
        (build_model(LLAMA, "fp32"), None),
        (build(num_layers=1), None),
    ],
    ids=["gpt", "gpt with dropout", "llama", "one layer"],
)
def test_blocks_are_pipeline_layers_and_share_no_array_but_the_one_they_hand_on(model, key):
    """Only one array crosses each boundary, so a stage waits for its neighbour alone."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    jaxpr = make_jaxpr(model.loss, params, random_batch(), key)
    made_in, crossing, layer = {}, {}, 0
    for equation in jaxpr.eqns:
        layer += equation.primitive.name == "pipeline_boundary"
        for variable in equation.invars:
            source = made_in.get(id(variable), layer)
            if source != layer:
                crossing.setdefault((source, layer), set()).add(id(variable))
        made_in.update({id(variable): layer for variable in equation.outvars})
    num_layers = sum("layers_" in name for name in params)
    assert layer == num_layers - 1
    assert {ends: len(variables) for ends, variables in crossing.items()} == {
        (i, i + 1): 1 for i in range(num_layers - 1)
    }


def test_parameters_have_megatron_names_and_an_axis_of_heads():
    tied = names_of(jax.eval_shape(build(num_layers=1).init, jax.random.key(0)))
    assert tied == {
        "word_embeddings/embedding": (256, 16),
        "position_embeddings": (16, 16),
        "layers_0/input_layernorm/scale": (16,),
        "layers_0/input_layernorm/bias": (16,),
        "layers_0/self_attention/linear_qkv/kernel": (16, 3, 2, 8),
        "layers_0/self_attention/linear_qkv/bias": (3, 2, 8),
        "layers_0/self_attention/linear_proj/kernel": (2, 8, 16),
        "layers_0/self_attention/linear_proj/bias": (16,),
        "layers_0/pre_mlp_layernorm/scale": (16,),
        "layers_0/pre_mlp_layernorm/bias": (16,),
        "layers_0/mlp/linear_fc1/kernel": (16, 64),
        "layers_0/mlp/linear_fc1/bias": (64,),
        "layers_0/mlp/linear_fc2/kernel": (64, 16),
        "layers_0/mlp/linear_fc2/bias": (16,),
        "final_layernorm/scale": (16,),
        "final_layernorm/bias": (16,),
    }
    untied = build(num_layers=1, tie_embeddings=False)
    assert names_of(jax.eval_shape(untied.init, jax.random.key(0))) == {
        **tied,
        "output_layer/kernel": (16, 256),
    }


@pytest.mark.parametrize("model", [build(), build_model(LLAMA, "fp32")], ids=["gpt", "llama"])
def test_an_untrained_model_knows_nothing(model):
    loss = loss_of(model, init(model), random_batch())
    assert loss.shape == ()
    assert float(loss) == pytest.approx(math.log(256), abs=0.05)


def test_the_loss_is_the_mean_negative_log_probability_of_the_targets():
    model, params, batch = build(), tiny_params(), random_batch()
    logits = np.asarray(logits_of(params, batch["tokens"]), np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    at_targets = np.take_along_axis(log_probabilities, batch["targets"][..., None], -1)
    np.testing.assert_allclose(loss_of(model, params, batch), -at_targets.mean(), rtol=1e-6)


def test_a_later_token_changes_no_earlier_logit():
    params, tokens = tiny_params(), random_batch()["tokens"]
    changed = tokens.copy()
    changed[:, 10] = (changed[:, 10] + 1) % 256
    before, after = logits_of(params, tokens), logits_of(params, changed)
    np.testing.assert_array_equal(before[:, :10], after[:, :10])
    assert (np.abs(before[:, 10:] - after[:, 10:]).max(-1) > 0).all()


def test_bf16_computes_in_bf16_and_keeps_parameters_and_loss_in_fp32():
    model, params, batch = build("bf16"), tiny_params(), random_batch()
    made = jax.eval_shape(model.init, jax.random.key(0))
    both = jax.value_and_grad(model.loss, has_aux=True)
    (loss, _), grads = jax.eval_shape(both, params, batch, None)
    assert dtypes_of([made, loss, grads]) == {"float32"}
    full = loss_of(build(), params, batch)
    assert float(loss_of(model, params, batch)) == pytest.approx(float(full), abs=0.02)

    equations = inline_calls(make_jaxpr(model.loss, params, batch, None)).eqns
    products = [e for e in equations if e.primitive.name == "dot_general"]
    assert dtypes_of([v.aval for e in products for v in [*e.invars, *e.outvars]]) == {"bfloat16"}
    exponentials = [e for e in equations if e.primitive.name == "exp"]
    assert len(exponentials) == TINY["num_layers"] + 1  # a softmax a block, and the loss
    assert dtypes_of([e.outvars[0].aval for e in exponentials]) == {"float32"}

    activations = jax.eval_shape(
        lambda p, t: GPT(GPTOptions(**TINY).filled(), jnp.bfloat16).apply(
            {"params": p}, t, True, capture_intermediates=True
        ),
        params,
        batch["tokens"],
    )
    assert dtypes_of(activations) == {"bfloat16"}


def dtypes_of(tree):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree)}


def test_dropout_needs_a_key_and_follows_it():
    model, still, params, batch = build(dropout=0.5), build(), tiny_params(), random_batch()

    def loss(model, seed=None):
        key = None if seed is None else jax.random.key(seed)
        return float(loss_of(model, params, batch, key))

    assert loss(model) == loss(still) == loss(still, seed=1)
    assert loss(model, seed=1) == loss(model, seed=1)
    assert len({loss(model), loss(model, seed=1), loss(model, seed=2)}) == 3


def test_scanned_layers_drop_out_by_the_key():
    model = build(scan_layers=True, num_layers=2, dropout=0.5)
    params, batch = init(model), random_batch()
    losses = {float(loss_of(model, params, batch, jax.random.key(i))) for i in range(3)}
    assert len(losses) == 3
