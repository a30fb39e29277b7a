"""Llama's arrays and settings as `transformers` names them: Llama, Mistral, Qwen 2 and 3, Gemma."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from launcher.base import DamagedError
from launcher.recipes.models.hugging_face import NAMES, Tensor, in_layers
from launcher.recipes.models.llama import LlamaOptions

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma")
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
UNREAD = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
AUTO_CLASS = "AutoModelForCausalLM"

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu"}
_LENGTH = "max_position_embeddings"
_ROPE = {  # Llama 3.1's stretching, of which only the factor is a setting
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
}


def options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model by its `config.json`.

    Raises:
        DamagedError: it has what the family cannot express.
        KeyError: it lacks what is needed.
    """
    kind = config["model_type"]
    rope = _rope_of(config)
    if config.get("attention_bias") and kind != "qwen2":
        raise DamagedError("attention_bias=true puts a bias on the output of attention, too")
    if config.get("mlp_bias"):
        raise DamagedError("mlp_bias=true is not supported")
    activation = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if kind == "gemma" and activation == "gelu":
        activation = "gelu_pytorch_tanh"  # the published files say gelu and mean this
    if activation not in _ACTIVATIONS or (activation == "gelu" and kind != "gemma"):
        raise DamagedError(f"the activation {activation!r} is not supported")
    return {
        **{ours: config[theirs] for ours, theirs in NAMES.items() if theirs != _LENGTH},
        "sequence_length": min(config.get(_LENGTH, 2048), 4096),
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_size": config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"],
        "mlp_size": config["intermediate_size"],
        "activation": _ACTIVATIONS[activation],
        "gated_mlp": True,
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "rope_base": float(rope.get("rope_theta", 10000.0)),
        "rope_factor": float(rope.get("factor", 1.0)),
        "sliding_window": _window_of(config),
        "qkv_bias": kind == "qwen2",
        "head_norm": kind == "qwen3",
        "scale_embeddings": kind == "gemma",
        "tie_embeddings": config.get("tie_word_embeddings", kind == "gemma"),
    }


def _rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a `config.json` says of rotary positions; it has done so in two forms."""
    found = {"rope_theta": config.get("rope_theta", 10000.0)}
    for name in ("rope_scaling", "rope_parameters"):
        found.update(config.get(name) or {})
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return {"rope_theta": found["rope_theta"]}
    if kind != "llama3":
        raise DamagedError(f"the rotary positions {kind!r} are not supported")
    for name, value in _ROPE.items():
        if found.get(name, value) != value:
            raise DamagedError(f"{name}={found[name]} of its rotary positions is not {value}")
    return found


def _window_of(config: Mapping[str, Any]) -> int:
    """Return how many positions a token sees in each layer, 0 for all.

    Qwen's first `max_window_layers` have no window, or `layer_types` says which have.

    Raises:
        DamagedError: some layers have a window and others do not.
    """
    window: int = config.get("sliding_window") or 0
    if config["model_type"] == "mistral":
        return window
    if not window or not config.get("use_sliding_window", False):
        return 0
    count, first = config["num_hidden_layers"], config.get("max_window_layers", 28)
    said = [f"{'sliding' if i >= first else 'full'}_attention" for i in range(count)]
    kinds = set(config.get("layer_types") or said)
    if len(kinds) > 1:
        raise DamagedError(
            "layers with and without a sliding window are not supported together "
            "(layer_types, max_window_layers)"
        )
    return window if kinds == {"sliding_attention"} else 0


def config_of(options: LlamaOptions) -> dict[str, Any]:
    """Return the `config.json` of a model.

    Raises:
        DamagedError: `transformers` has no such model.
    """
    kind = _kind(options)
    found = {"architectures": [_ARCHITECTURES[kind]], "model_type": kind, **common_config(options)}
    if kind == "gemma":
        found["hidden_activation"] = "gelu_pytorch_tanh"
    if kind == "mistral":
        found["sliding_window"] = options.sliding_window or None
    elif options.sliding_window:
        layers = options.num_layers
        found |= {"use_sliding_window": True, "sliding_window": options.sliding_window}
        found |= {"max_window_layers": 0, "layer_types": ["sliding_attention"] * layers}
    return found


def common_config(options: LlamaOptions) -> dict[str, Any]:
    """Return what the `config.json` of each of these models says, and that of one with experts."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": options.rope_base}
    scaling = {**_ROPE, "factor": options.rope_factor} if options.rope_factor != 1.0 else {}
    return {
        **{theirs: getattr(options, ours) for ours, theirs in NAMES.items()},
        "num_key_value_heads": options.num_kv_heads,
        "head_dim": options.head_size,
        "intermediate_size": options.mlp_size,
        "hidden_act": "silu" if options.activation == "silu" else "gelu_pytorch_tanh",
        "rms_norm_eps": options.norm_epsilon,
        "rope_theta": options.rope_base,  # in both forms
        "rope_parameters": rope | scaling,
        **({"rope_scaling": scaling} if scaling else {}),
        "tie_word_embeddings": options.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def _kind(options: LlamaOptions) -> str:
    """Return the `model_type` that has these features."""
    if not options.gated_mlp:
        raise DamagedError("transformers has no Llama whose MLP is not gated (gated_mlp=false)")
    extra = {
        "qwen2": options.qkv_bias,
        "qwen3": options.head_norm,
        "gemma": options.scale_embeddings,
    }
    kinds = [kind for kind, on in extra.items() if on]
    if len(kinds) > 1:
        raise DamagedError(f"transformers has no model that is {' and '.join(kinds)} in one")
    if kinds == ["gemma"] and options.sliding_window:
        raise DamagedError("transformers has no Gemma with a sliding window")
    if kinds:
        return kinds[0]
    return "mistral" if options.sliding_window else "llama"


def tensors(options: LlamaOptions) -> Iterator[Tensor]:
    """Yield each array."""
    mlp = list(feed_forward(options.hidden_size, options.mlp_size))
    yield from tensors_around(options, lambda index: mlp)


def tensors_around(
    options: LlamaOptions, mlp: Callable[[int], Iterable[Tensor]]
) -> Iterator[Tensor]:
    """Yield each array of a model whose MLPs are its own.

    Args:
        options: the settings.
        mlp: returns the arrays of a block's MLP, by their names in the block.
    """
    hidden = options.hidden_size
    words: Any = {"split": (options.vocab_size, hidden), "of_vocabulary": True}
    offset = 1.0 if options.scale_embeddings else 0.0  # Gemma stores its norms less 1
    yield Tensor("model.embed_tokens.weight", "word_embeddings.embedding", **words)
    rest = list(_attention_and_norms(options, hidden, offset))
    yield from in_layers(options.num_layers, "model.layers", lambda i: (*rest, *mlp(i)))
    yield Tensor("model.norm.weight", "final_layernorm.scale", (hidden,), offset=offset)
    if not options.tie_embeddings:
        yield Tensor("lm_head.weight", "output_layer.kernel", order=(1, 0), **words)


def _attention_and_norms(options: LlamaOptions, hidden: int, offset: float) -> Iterator[Tensor]:
    """Yield the arrays of a block but for those of its MLP, by their names in it."""
    size = options.head_size
    heads, shared = options.num_heads, options.num_kv_heads
    for name, count in (("q", heads), ("k", shared), ("v", shared)):
        theirs, ours = f"self_attn.{name}_proj", f"self_attention.linear_{name}"
        split = (count, size, hidden)
        yield Tensor(f"{theirs}.weight", f"{ours}.kernel", split, (2, 0, 1), joined=(2, 1))
        if options.qkv_bias:
            yield Tensor(f"{theirs}.bias", f"{ours}.bias", (count, size), joined=(2,))
    if options.head_norm:
        for name in ("q_norm", "k_norm"):
            yield Tensor(f"self_attn.{name}.weight", f"self_attention.{name}.scale", (size,))
    split = (hidden, heads, size)
    theirs, ours = "self_attn.o_proj.weight", "self_attention.linear_proj.kernel"
    yield Tensor(theirs, ours, split, (1, 2, 0), joined=(1, 2))
    for theirs, ours in (
        ("input_layernorm", "input_layernorm"),
        ("post_attention_layernorm", "pre_mlp_layernorm"),
    ):
        yield Tensor(f"{theirs}.weight", f"{ours}.scale", (hidden,), offset=offset)


def feed_forward(hidden: int, width: int) -> Iterator[Tensor]:
    """Yield the arrays of a gated MLP, by their names in its block."""
    for name in ("gate", "up", "down"):
        shape = (hidden, width) if name == "down" else (width, hidden)
        yield Tensor(f"mlp.{name}_proj.weight", f"mlp.linear_{name}.kernel", shape, (1, 0))
