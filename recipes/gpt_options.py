"""The settings of a GPT. Its size is a row of dimensions, which fills those that are not set."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from launcher.config.errors import ConfigError, advice
from launcher.config.families import ModelOptions, register
from launcher.config.fields import LARGEST, number

DIMENSIONS = ("vocab_size", "sequence_length", "num_layers", "num_heads", "hidden_size")


@register
@dataclass(frozen=True)
class GPTOptions(ModelOptions):
    """A decoder-only transformer. A size names a row of `sizes`; a field that is set beats it.

    Once a configuration is loaded every dimension is set and `sizes` is empty.
    """

    name: str = "gpt"
    size: str | None = "nano"
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    vocab_size: int | None = number(None, minimum=2)
    sequence_length: int | None = number(None, minimum=1)
    # Each is traced by itself: more than the deepest published (DeepNet, 2022) would take hours.
    num_layers: int | None = number(None, minimum=1, maximum=1000)
    num_heads: int | None = number(None, minimum=1)
    hidden_size: int | None = number(None, minimum=1)
    mlp_ratio: int = number(4, minimum=1)
    dropout: float = number(0.0, minimum=0.0, maximum=1.0)
    tie_embeddings: bool = True
    scan_layers: bool = False

    shorthands: ClassVar = {"size": ("sizes", *DIMENSIONS)}

    @property
    def layers(self) -> int:
        """The number of pipeline layers: one more than the model's marks."""
        assert self.num_layers is not None, "the size has not been filled in"
        return self.num_layers

    def filled(self) -> Self:
        """Return the settings with every dimension set; one that was set stays.

        Raises:
            ConfigError: a size that `sizes` lacks, a row with a name that is no dimension, a
                dimension that neither the user nor the size gives.
        """
        row = self._row()
        filled: dict[str, Any] = {
            name: value if (value := getattr(self, name)) is not None else row.get(name)
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
                    keys=[f"model.sizes.{self.size}.{name}"],
                )
            if value > LARGEST:
                raise ConfigError(
                    f"model.{name} must be at most {LARGEST}, not {value}",
                    keys=[f"model.sizes.{self.size}.{name}"],
                )
        return dataclasses.replace(self, sizes={}, **filled)

    def check(self) -> Iterator[ConfigError]:
        """Yield an error where the heads cannot be equal."""
        if self.hidden_size and self.num_heads and self.hidden_size % self.num_heads:
            yield ConfigError(
                f"model.hidden_size={self.hidden_size} cannot be cut into "
                f"model.num_heads={self.num_heads} equal heads",
                "Make it a multiple.",
                ["model.hidden_size", "model.num_heads"],
            )

    def _row(self) -> dict[str, int]:
        """Return the dimensions that the size gives."""
        if self.size is None or not self.sizes:
            return {}
        if self.size not in self.sizes:
            raise ConfigError(
                f"There is no model.size={self.size}",
                advice(self.size, list(self.sizes), "Sizes"),
                ["model.size"],
            )
        row = self.sizes[self.size]
        for name in row:
            if name not in DIMENSIONS:
                raise ConfigError(
                    f"model.sizes.{self.size}.{name} is not a dimension",
                    advice(name, DIMENSIONS),
                    [f"model.sizes.{self.size}.{name}"],
                )
        return row
