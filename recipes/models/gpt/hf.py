"""GPT-2's arrays and settings as `transformers` names them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.hugging_face import Tensor, expect, in_layers, layer_norm, ratio_of

MODEL_TYPES = ("gpt2",)
TIED = {"lm_head.weight": "transformer.wte.weight"}
UNREAD = re.compile(r"(^|\.)attn\.(masked_)?bias$")  # the causal mask, and what it masks with
AUTO_CLASS = "AutoModelForCausalLM"

_NAMES = {
    "vocab_size": "vocab_size",
    "sequence_length": "n_positions",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "hidden_size": "n_embd",
}
_FIXED = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}


def options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model by its `config.json`.

    Raises:
        DamagedError: it has what the family cannot express.
        KeyError: it lacks what is needed.
    """
    expect(config, _FIXED | {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True})
    return {
        "mlp_ratio": ratio_of(
            config, "n_inner", config.get("n_inner") or 4 * config["n_embd"], "n_embd"
        ),
        **{ours: config[theirs] for ours, theirs in _NAMES.items()},
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def config_of(options: GPTOptions) -> dict[str, Any]:
    """Return the `config.json` of a model."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(options, ours) for ours, theirs in _NAMES.items()},
        "n_inner": options.mlp_ratio * options.hidden_size,
        **_FIXED,
        **dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), options.dropout),
        "tie_word_embeddings": options.tie_embeddings,
    }


def tensors(options: GPTOptions) -> Iterator[Tensor]:
    """Yield each array."""
    hidden, length = options.hidden_size, options.sequence_length
    words = (options.vocab_size, hidden)
    yield Tensor("transformer.wte.weight", "word_embeddings.embedding", words, of_vocabulary=True)
    yield Tensor("transformer.wpe.weight", "position_embeddings", (length, hidden))
    block = list(_block(options, hidden))
    yield from in_layers(options.num_layers, "transformer.h", lambda _: block)
    yield from layer_norm("transformer.ln_f", "final_layernorm", hidden)
    if not options.tie_embeddings:
        yield Tensor("lm_head.weight", "output_layer.kernel", words, (1, 0), of_vocabulary=True)


def _block(options: GPTOptions, hidden: int) -> Iterator[Tensor]:
    """Yield the arrays of a block, by their names in it; matrices are [inputs, outputs] there."""
    heads = options.num_heads
    size, width = hidden // heads, options.mlp_ratio * hidden
    qkv, mixed = "self_attention.linear_qkv", "self_attention.linear_proj"
    yield from layer_norm("ln_1", "input_layernorm", hidden)
    yield from layer_norm("ln_2", "pre_mlp_layernorm", hidden)
    split = (hidden, 3, heads, size)
    yield Tensor("attn.c_attn.weight", f"{qkv}.kernel", split, joined=(1, 3))
    yield Tensor("attn.c_attn.bias", f"{qkv}.bias", split[1:], joined=(3,))
    yield Tensor("attn.c_proj.weight", f"{mixed}.kernel", (heads, size, hidden), joined=(2, 1))
    yield Tensor("attn.c_proj.bias", f"{mixed}.bias", (hidden,))
    for theirs, ours, shape in (
        ("mlp.c_fc", "mlp.linear_fc1", (hidden, width)),
        ("mlp.c_proj", "mlp.linear_fc2", (width, hidden)),
    ):
        yield Tensor(f"{theirs}.weight", f"{ours}.kernel", shape)
        yield Tensor(f"{theirs}.bias", f"{ours}.bias", shape[1:])
