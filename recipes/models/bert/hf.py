"""BERT's arrays and settings as `transformers` names them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.recipes.models.bert import BERTOptions
from launcher.recipes.models.hugging_face import (
    NAMES,
    Tensor,
    expect,
    in_layers,
    layer_norm,
    ratio_of,
)

MODEL_TYPES = ("bert",)
CHOICES = ("mask_token",)
TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
UNREAD = re.compile(r"^(bert\.)?pooler\.|^cls\.seq_relationship\.|(^|\.)position_ids$")
RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
AUTO_CLASS = "AutoModelForMaskedLM"

_KINDS = 2  # of sentences; a model here gets one kind only
_FIXED = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": _KINDS,
    "tie_word_embeddings": True,
}


def options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model by its `config.json`.

    Raises:
        DamagedError: it has what the family cannot express.
        KeyError: it lacks what is needed.
    """
    expect(config, _FIXED | {"position_embedding_type": "absolute", "is_decoder": False})
    # transformers keeps it with the tokenizer, and in config.json whatever else it finds there.
    mask = config.get("mask_token_id")
    return {
        "mlp_ratio": ratio_of(
            config, "intermediate_size", config["intermediate_size"], "hidden_size"
        ),
        **({} if mask is None else {"mask_token": mask}),
        **{ours: config[theirs] for ours, theirs in NAMES.items()},
    }


def config_of(options: BERTOptions) -> dict[str, Any]:
    """Return the `config.json` of a model."""
    return {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        **{theirs: getattr(options, ours) for ours, theirs in NAMES.items()},
        "intermediate_size": options.mlp_ratio * options.hidden_size,
        **_FIXED,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "mask_token_id": options.mask_token,
    }


def tensors(options: BERTOptions) -> Iterator[Tensor]:
    """Yield each array."""
    hidden, length = options.hidden_size, options.sequence_length
    vocabulary = options.vocab_size
    place, head = "bert.embeddings", "cls.predictions"
    words = f"{place}.word_embeddings.weight", "word_embeddings.embedding"
    yield Tensor(*words, (vocabulary, hidden), of_vocabulary=True)
    yield Tensor(f"{place}.position_embeddings.weight", "position_embeddings", (length, hidden))
    yield Tensor(f"{place}.token_type_embeddings.weight", "kind_embeddings", (_KINDS, hidden))
    yield from layer_norm(f"{place}.LayerNorm", "embedding_layernorm", hidden)
    block = list(_block(options, hidden))
    yield from in_layers(options.num_layers, "bert.encoder.layer", lambda _: block)
    yield from _dense(f"{head}.transform.dense", "head_dense", hidden, hidden)
    yield from layer_norm(f"{head}.transform.LayerNorm", "head_layernorm", hidden)
    yield Tensor(f"{head}.bias", "head_bias", (vocabulary,), of_vocabulary=True)


def _block(options: BERTOptions, hidden: int) -> Iterator[Tensor]:
    """Yield the arrays of a block, by their names in it; queries, keys and values are one here."""
    heads, width = options.num_heads, options.mlp_ratio * hidden
    size = hidden // heads
    for number, name in enumerate(("query", "key", "value")):
        theirs, ours = f"attention.self.{name}", "linear_qkv"
        split = (heads, size, hidden)
        yield Tensor(
            f"{theirs}.weight", f"{ours}.kernel", split, (2, 0, 1), joined=(2, 1),
            part=(1, number, 3),
        )  # fmt: skip
        yield Tensor(f"{theirs}.bias", f"{ours}.bias", split[:2], joined=(2,), part=(0, number, 3))
    theirs, ours, split = "attention.output.dense", "linear_proj", (hidden, heads, size)
    yield Tensor(f"{theirs}.weight", f"{ours}.kernel", split, (1, 2, 0), joined=(1, 2))
    yield Tensor(f"{theirs}.bias", f"{ours}.bias", (hidden,))
    yield from layer_norm("attention.output.LayerNorm", "attention_layernorm", hidden)
    yield from _dense("intermediate.dense", "linear_fc1", hidden, width)
    yield from _dense("output.dense", "linear_fc2", width, hidden)
    yield from layer_norm("output.LayerNorm", "mlp_layernorm", hidden)


def _dense(theirs: str, ours: str, inputs: int, outputs: int) -> Iterator[Tensor]:
    yield Tensor(f"{theirs}.weight", f"{ours}.kernel", (outputs, inputs), (1, 0))
    yield Tensor(f"{theirs}.bias", f"{ours}.bias", (outputs,))
