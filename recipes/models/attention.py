"""Choose the attention program: XLA's products and softmax, or cuDNN's fused kernel.

The fused kernel (Dao et al., 2022, "FlashAttention") holds no scores of pairs of tokens. It
computes in 16 bits and takes no dropout.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from launcher.recipes.protocols import InputError

_LARGEST_HEAD, _MULTIPLE = 128, 8  # of heads that it takes on every kind
_SINCE = 8.0  # the compute capability of NVIDIA's Ampere


def with_attention(options: Any, precision: str, compute_capability: float | None) -> Any:
    """Return a model's settings with `attention` said: "xla" or "cudnn".

    "auto" is cuDNN's where the devices have it and the model can use it. Asked for by name, it is
    also taken where the devices are not known, and CPUs compute what it means, for tests.

    Args:
        options: the model's settings.
        precision: "fp32" or "bf16".
        compute_capability: of the GPUs that train, as NVIDIA numbers it; None: of CPUs, or unknown.

    Raises:
        InputError: cuDNN's is asked for where there is none.
    """
    wanted = getattr(options, "attention", None)
    if wanted not in ("auto", "cudnn"):
        return options
    unfit = _unfit(options, precision)
    if wanted == "auto":
        has_kernel = compute_capability is not None and compute_capability >= _SINCE
        found = "cudnn" if has_kernel and not unfit else "xla"
        return dataclasses.replace(options, attention=found)
    if compute_capability is not None and compute_capability < _SINCE:
        unfit = f"needs GPUs of compute capability {_SINCE} or more, and these have "
        unfit += str(compute_capability)
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
