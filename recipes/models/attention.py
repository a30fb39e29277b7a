"""Choose the attention program: XLA's products and softmax, or cuDNN's fused kernel.

The fused kernel (Dao et al., 2022, "FlashAttention") holds no scores of pairs of tokens. It
computes in 16 bits and takes no dropout.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from launcher.recipes.protocols import InputError

_LARGEST_HEAD, _MULTIPLE = 128, 8  # of heads that it takes on every kind
# NVIDIA's GPUs since Ampere, as JAX, nvidia-smi and conf/device/ name them.
_KINDS = re.compile(r"\b(A\d{1,3}G?|L\d{1,2}S?|G?H\d{3}|G?B\d{3}|RTX [3-9A]\w*)\b", re.IGNORECASE)


def with_attention(options: Any, precision: str, device_kind: str) -> Any:
    """Return a model's settings with `attention` said: "xla" or "cudnn".

    "auto" is cuDNN's where the devices have it and the model can use it. CPUs compute what cuDNN's
    means, for tests.

    Args:
        options: the model's settings.
        precision: "fp32" or "bf16".
        device_kind: the devices that train, as JAX names them.

    Raises:
        InputError: cuDNN's is asked for where there is none.
    """
    wanted = getattr(options, "attention", None)
    if wanted not in ("auto", "cudnn"):
        return options
    unfit, has_kernel = _unfit(options, precision), bool(_KINDS.search(device_kind))
    if wanted == "auto":
        found = "cudnn" if has_kernel and not unfit else "xla"
        return dataclasses.replace(options, attention=found)
    if not has_kernel and device_kind != "cpu":
        unfit = f"needs an NVIDIA GPU since Ampere, which {device_kind} is not"
    if unfit:
        raise InputError(f"model.attention=cudnn {unfit}; or set model.attention=auto")
    return options


def _unfit(options: Any, precision: str) -> str:
    """Say why a model cannot use cuDNN's attention on any device; empty if it can."""
    if precision != "bf16":
        return f"computes in 16 bits: set train.precision=bf16, not {precision}"
    if getattr(options, "dropout", 0.0):
        return "takes no dropout: set model.dropout=0"
    size = getattr(options, "head_size", None) or options.hidden_size // options.num_heads
    if size > _LARGEST_HEAD or size % _MULTIPLE:
        return (
            f"takes heads of a multiple of {_MULTIPLE} up to {_LARGEST_HEAD}, not of {size}: set "
            "model.num_heads or model.hidden_size"
        )
    length = getattr(options, "attention_length", None) or getattr(options, "sequence_length", None)
    if (length or 0) % 2:  # JAX's training rule refuses it
        return f"takes an even number of positions, not {length}"
    return ""
