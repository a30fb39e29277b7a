"""Products of bfloat16, said in float32 where GPUs have no others."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launcher.config.compose import load
from launcher.trace import (
    PRODUCTS,
    inline_calls,
    is_var,
    make_jaxpr,
    products_in_fp32,
    source_line,
    walk,
)
from launcher.train.program import build_program

WORDS = ("task=plan", "dataset=synthetic", "train.precision=bf16", "train.eval_every=0")
MODELS = [
    "model=gpt model.size=nano",
    "model=bert model.hidden_size=32 model.num_heads=2 model.num_layers=2 model.vocab_size=64",
    "model=resnet model.depth=10 model.width=8 model.image_size=16",
]


def products(equations):
    found = [eqn for eqn in walk(equations) if eqn.primitive.name in PRODUCTS]
    assert found
    return found


def has_bf16(eqn):
    return any(is_var(v) and v.aval.dtype == jnp.bfloat16 for v in eqn.invars)


@pytest.mark.parametrize("model", MODELS)
def test_a_gpu_without_bf16_gets_no_product_of_it(model):
    config = load([*WORDS, *model.split()])
    narrow, wide = (build_program(config, of).train.opened.loss(1) for of in (8.0, 7.0))
    assert any(has_bf16(eqn) for eqn in products(narrow.equations))
    assert not any(has_bf16(eqn) for eqn in products(wide.equations))
    assert all(eqn.params.get("precision") is None for eqn in products(wide.equations))


def attention(query, key):
    mixed = jax.nn.dot_product_attention(query, key, key, is_causal=True)
    return jnp.sum(jax.checkpoint(lambda x: jnp.einsum("btnh,bsnh->bts", x, x))(mixed))


def test_values_and_gradients_are_those_of_32_bits():
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.normal(size=(2, 8, 2, 4)), jnp.bfloat16) for _ in range(2))
    wide = jax.value_and_grad(products_in_fp32(attention), (0, 1))(query, key)
    exact = jax.value_and_grad(attention, (0, 1))(*(x.astype(jnp.float32) for x in (query, key)))
    for a, b in zip(jax.tree.leaves(wide), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), b, 0.05, 0.1)
    backward = inline_calls(make_jaxpr(jax.grad(products_in_fp32(attention)), query, key))
    assert not any(has_bf16(eqn) for eqn in products(backward.eqns))
    assert all(Path(__file__).name in source_line(eqn) for eqn in products(backward.eqns))
