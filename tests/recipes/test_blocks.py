"""Equal blocks are traced once, and their program is that of blocks that are traced one by one."""

import jax
import jax.numpy as jnp
import pytest

from launcher.recipes import build_model
from launcher.recipes.models import blocks
from launcher.recipes.models.bert import BERTOptions
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.llama import LlamaOptions
from launcher.recipes.models.vit import ViTOptions
from launcher.trace.ir.cudnn import described_cudnn
from launcher.trace.ir.jaxpr import inline_calls, make_jaxpr, structure_text

LAYERS, ROWS, LENGTH = 3, 2, 8
SHAPE = {"num_layers": LAYERS, "num_heads": 2, "hidden_size": 16}
TEXT = SHAPE | {"vocab_size": 32, "sequence_length": LENGTH}


def texts(*names):
    floats = ("weights",)
    return {
        name: jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.float32 if name in floats else jnp.int32)
        for name in ("tokens", "targets", *names)
    }


PICTURES = {
    "image": jax.ShapeDtypeStruct((ROWS, 8, 8, 2), jnp.float32),
    "label": jax.ShapeDtypeStruct((ROWS,), jnp.int32),
}
CASES = {
    "gpt": (GPTOptions(size=None, **TEXT).filled(), texts()),
    "gpt, packed": (
        GPTOptions(size=None, **TEXT).filled(),
        texts("segments", "positions", "weights"),
    ),
    "gpt, fused": (GPTOptions(size=None, attention="cudnn", **TEXT).filled(), texts()),
    "llama": (LlamaOptions(**TEXT), texts()),
    "llama, packed": (LlamaOptions(**TEXT), texts("segments", "positions", "weights")),
    "bert": (BERTOptions(size=None, **TEXT).filled(), texts("weights")),
    "vit": (
        ViTOptions(size=None, **SHAPE, image_size=8, channels=2, num_classes=4, patch_size=4),
        PICTURES,
    ),
}


def program_of(options, batch, key=None):
    model = build_model(options.filled(), "bf16")
    with described_cudnn():
        params = jax.eval_shape(model.init, jax.random.key(0))
        return make_jaxpr(model.loss, params, batch, key)


@pytest.mark.devices
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "vit"])
def test_blocks_begin_with_numbers_of_their_own_by_one_program(name, monkeypatch):
    options, _ = CASES[name]
    made = []
    first = blocks._first_function
    monkeypatch.setattr(
        blocks, "_first_function", lambda *of: lambda *given: made.append(1) or first(*of)(*given)
    )
    params = jax.jit(build_model(options.filled(), "fp32").init)(jax.random.key(0))
    assert len(made) == 1
    one, *others = (params[f"layers_{i}"] for i in range(LAYERS))
    for other in others:
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            drawn = jnp.ptp(a) > 0  # not the zeros of a bias, nor the ones of a norm
            assert a.shape == b.shape
            assert not drawn or float(jnp.max(jnp.abs(a - b))) > 0


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_traced_once_and_are_the_same_program(name, monkeypatch):
    options, batch = CASES[name]
    program = program_of(options, batch)
    bodies = [e.params["jaxpr"] for e in program.eqns if e.params.get("name") == "block"]
    assert len(bodies) == LAYERS
    assert len(set(map(id, bodies))) == 1
    monkeypatch.setattr(blocks.jax, "jit", lambda fun: fun)
    one_by_one = program_of(options, batch)
    assert structure_text(inline_calls(program)) == structure_text(inline_calls(one_by_one))


def test_blocks_that_draw_numbers_draw_different_ones():
    options = GPTOptions(size=None, dropout=0.5, **TEXT).filled()
    program = inline_calls(program_of(options, texts(), jax.random.key(0)))
    folds = [e for e in program.eqns if e.primitive.name == "random_fold_in"]
    numbers = {str(e.invars[1]) for e in folds}
    assert len(numbers) == len(folds) == 1 + 3 * LAYERS
