"""A GPT's size is a row of dimensions: this fills the ones that the user did not set."""

from __future__ import annotations

import dataclasses
from typing import Any

from launcher.config.build import LARGEST
from launcher.config.errors import ConfigError, advice
from launcher.config.schema import GPTOptions

DIMENSIONS = ("vocab_size", "sequence_length", "num_layers", "num_heads", "hidden_size")


def fill_size(gpt: GPTOptions) -> GPTOptions:
    """Returns `gpt` with every dimension set and `sizes` emptied; a dimension that was set stays.

    Raises:
        ConfigError: a size that `sizes` lacks, a row with a name that is no dimension, a dimension
            that neither the user nor the size gives.
    """
    row = _row(gpt)
    filled: dict[str, Any] = {
        name: value if (value := getattr(gpt, name)) is not None else row.get(name)
        for name in DIMENSIONS
    }
    for name, value in filled.items():
        if value is None:
            raise ConfigError(
                f"model.{name} is not set",
                f"Choose a model.size, or give model.{name}=VALUE.",
            )
        if value < 1:
            raise ConfigError(
                f"model.{name} must be at least 1, not {value}",
                keys=[f"model.sizes.{gpt.size}.{name}"],
            )
        if value > LARGEST:
            raise ConfigError(
                f"model.{name} must be at most {LARGEST}, not {value}",
                keys=[f"model.sizes.{gpt.size}.{name}"],
            )
    return dataclasses.replace(gpt, sizes={}, **filled)


def _row(gpt: GPTOptions) -> dict[str, int]:
    if gpt.size is None or not gpt.sizes:
        return {}
    if gpt.size not in gpt.sizes:
        raise ConfigError(
            f"There is no model.size={gpt.size}",
            advice(gpt.size, list(gpt.sizes), "Sizes"),
            ["model.size"],
        )
    row = gpt.sizes[gpt.size]
    for name in row:
        if name not in DIMENSIONS:
            raise ConfigError(
                f"model.sizes.{gpt.size}.{name} is not a dimension",
                advice(name, DIMENSIONS),
                [f"model.sizes.{gpt.size}.{name}"],
            )
    return row
