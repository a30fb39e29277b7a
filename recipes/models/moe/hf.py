"""The arrays and settings of mixtures of experts as `transformers` names them: Mixtral, Qwen 3.

Neither drops a token, so models come from there with `capacity_factor=0`. A run may choose another
factor for the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.base import DamagedError
from launcher.recipes.models.hugging_face import Tensor
from launcher.recipes.models.llama import hf as llama_hf
from launcher.recipes.models.moe import MoEOptions

MODEL_TYPES = ("mixtral", "qwen3_moe")
CHOICES = ("capacity_factor",)
TIED, UNREAD, AUTO_CLASS = llama_hf.TIED, llama_hf.UNREAD, llama_hf.AUTO_CLASS

# The prefix of a layer's router and experts, and the names of the kernels
# that are gate, up and down here.
_NAMES = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


def options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model by its `config.json`.

    Raises:
        DamagedError: it has what the family cannot express.
        KeyError: it lacks what is needed.
    """
    qwen = config["model_type"] == "qwen3_moe"
    count = "num_local_experts" if "num_local_experts" in config or not qwen else "num_experts"
    common = dict(config) | {"model_type": "qwen3" if qwen else "mistral"}
    common |= {"max_window_layers": 0, "layer_types": None}  # a window is that of all layers
    found = llama_hf.options_of(common)
    if found["activation"] != "silu":
        raise DamagedError(f"the activation {config['hidden_act']!r} is not supported")
    if qwen and not config.get("norm_topk_prob", False):
        raise DamagedError("norm_topk_prob=false is not supported: an expert's weights sum up to 1")
    if config.get("mlp_only_layers"):
        raise DamagedError("mlp_only_layers is not supported; decoder_sparse_step is")
    width = config["moe_intermediate_size"] if qwen else config["intermediate_size"]
    return {
        **found,
        "num_experts": config[count],
        "experts_per_token": config["num_experts_per_tok"],
        "expert_size": width,
        "shared_size": 0,
        "expert_every": config.get("decoder_sparse_step", 1) if qwen else 1,
        "capacity_factor": 0.0,
    }


def config_of(options: MoEOptions) -> dict[str, Any]:
    """Return the `config.json` of a model.

    Raises:
        DamagedError: `transformers` has no such model.
    """
    kind = _kind(options)
    qwen = kind == "qwen3_moe"
    own: dict[str, Any] = {
        "num_local_experts": options.num_experts,
        "intermediate_size": options.expert_size,
        "sliding_window": options.sliding_window or None,
    }
    if qwen:
        own = {
            "num_experts": options.num_experts,
            "moe_intermediate_size": options.expert_size,
            "decoder_sparse_step": options.expert_every,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "use_sliding_window": False,
        }
    return {
        "architectures": ["Qwen3MoeForCausalLM" if qwen else "MixtralForCausalLM"],
        "model_type": kind,
        **llama_hf.common_config(options),
        "num_experts_per_tok": options.experts_per_token,
        "router_aux_loss_coef": options.balance_loss,
        **own,
    }


def _kind(options: MoEOptions) -> str:
    """Return the `model_type` that has these features."""
    for name, is_lacking in (
        ("activation=gelu", options.activation != "silu"),
        ("gated_mlp=false", not options.gated_mlp),
        ("qkv_bias=true", options.qkv_bias),
        ("scale_embeddings=true", options.scale_embeddings),
        ("shared_size", bool(options.shared_size)),
    ):
        if is_lacking:
            raise DamagedError(f"transformers has no such mixture of experts with model.{name}")
    kind = "qwen3_moe" if options.head_norm else "mixtral"
    if kind == "mixtral" and options.expert_every != 1:
        raise DamagedError("transformers has no Mixtral with model.expert_every other than 1")
    if kind == "qwen3_moe" and options.sliding_window:
        raise DamagedError("a Qwen 3 with experts and model.sliding_window is not supported")
    return kind


def tensors(options: MoEOptions) -> Iterator[Tensor]:
    """Yield each array."""
    hidden, every = options.hidden_size, options.expert_every
    experts = list(_experts(options, hidden))
    dense = list(llama_hf.feed_forward(hidden, options.mlp_size))
    yield from llama_hf.tensors_around(
        options, lambda index: experts if index % every == every - 1 else dense
    )


def _experts(options: MoEOptions, hidden: int) -> Iterator[Tensor]:
    """Yield the router's array and those of each expert, which are stacked here."""
    place, names = _NAMES[_kind(options)]
    count, width = options.num_experts, options.expert_size
    yield Tensor(f"{place}.gate.weight", "experts.router.kernel", (count, hidden), (1, 0))
    for expert in range(count):
        for theirs, ours in zip(names, ("gate", "up", "down"), strict=True):
            shape = (hidden, width) if ours == "down" else (width, hidden)
            yield Tensor(
                f"{place}.experts.{expert}.{theirs}.weight",
                f"experts.experts_{ours}",
                shape,
                (1, 0),
                part=(0, expert, count),
            )
