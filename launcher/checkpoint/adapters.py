"""Low-rank adapters among a model's parameters: their names, and kernels with them added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from launcher.config.optimizer import Lora

ADAPTERS = "lora"  # the parameter beside the model's own, and the first word of their names


def without_adapters(params: Any) -> Any:
    """Return the parameters of the model alone, as they are."""
    if not isinstance(params, Mapping) or ADAPTERS not in params:
        return params
    return {name: part for name, part in params.items() if name != ADAPTERS}


def adapters_of(params: Any) -> dict[str, tuple[Any, Any]]:
    """Return the adapters among parameters, by the names of their kernels."""
    return {} if without_adapters(params) is params else dict(_pairs(params[ADAPTERS]))


def adapted_kernel(kernel: Any, a: Any, b: Any, options: Lora) -> Any:
    """Return a kernel with its adapter added, of NumPy's or of JAX's arrays.

    Args:
        kernel: float [stack..., rows..., columns...].
        a: float [stack..., rows, rank].
        b: float [stack..., rank, columns].
        options: their rank and factor.
    """
    sums = a @ b * np.float32(options.alpha / options.rank)
    return kernel + sums.reshape(kernel.shape).astype(kernel.dtype)


def _pairs(adapters: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield each kernel's name and its adapter."""
    if "a" in adapters and not isinstance(adapters["a"], Mapping):
        yield prefix.removesuffix("."), (adapters["a"], adapters["b"])
        return
    for word, part in adapters.items():
        yield from _pairs(part, f"{prefix}{word}.")
