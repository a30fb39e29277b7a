"""The settings of BERT: an encoder that fills in masked tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from launcher.config.errors import ConfigError
from launcher.config.families import register
from launcher.config.fields import choice, number
from recipes.sizes import SizedOptions

_DIMENSIONS = ("vocab_size", "sequence_length", "num_layers", "num_heads", "hidden_size")


@register
@dataclass(frozen=True)
class BERTOptions(SizedOptions):
    """An encoder. A size names a row of `sizes`; a field that is set beats it."""

    name: str = "bert"
    size: str | None = "nano"
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    vocab_size: int | None = number(None, minimum=2)
    sequence_length: int | None = number(None, minimum=1)
    num_layers: int | None = number(None, minimum=1, maximum=1000)
    num_heads: int | None = number(None, minimum=1)
    hidden_size: int | None = number(None, minimum=1)
    mlp_ratio: int = number(4, minimum=1)
    mask_every: int = number(7, minimum=2)
    attention: str = choice("auto", "auto", "xla", "cudnn")

    dimensions: ClassVar[tuple[str, ...]] = _DIMENSIONS
    shorthands: ClassVar = {"size": ("sizes", *_DIMENSIONS)}

    @property
    def layers(self) -> int:
        """The number of pipeline layers: one more than the model's marks."""
        assert self.num_layers is not None, "the size has not been filled in"
        return self.num_layers

    def check(self) -> Iterator[ConfigError]:
        """Yield an error where the heads cannot be equal."""
        if self.hidden_size and self.num_heads and self.hidden_size % self.num_heads:
            yield ConfigError(
                f"model.hidden_size={self.hidden_size} cannot be cut into "
                f"model.num_heads={self.num_heads} equal heads",
                "Make it a multiple.",
                ["model.hidden_size", "model.num_heads"],
            )
