"""The settings of BERT: an encoder that fills in masked tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from launcher.config.errors import ConfigError
from launcher.config.families import register
from launcher.config.fields import choice, number
from launcher.recipes.models.sizes import SizedOptions, uneven

_DIMENSIONS = ("vocab_size", "sequence_length", "num_layers", "num_heads", "hidden_size")
_FEATURES = {
    "mlp_ratio": 4,
    "mask_token": None,  # the tokenizer's, or the vocabulary's last
}


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
    mlp_ratio: int | None = number(None, minimum=1)
    mask_every: int = number(7, minimum=2)
    mask_token: int | None = number(None, minimum=0)
    scan_layers: bool = False
    loss_chunks: int = number(1, minimum=1)
    attention: str = choice("auto", "auto", "xla", "cudnn")

    dimensions: ClassVar[tuple[str, ...]] = _DIMENSIONS
    features: ClassVar[Mapping[str, Any]] = _FEATURES
    optional: ClassVar[tuple[str, ...]] = ("mask_token",)

    def check(self) -> Iterator[ConfigError]:
        """Yield an error where heads or parts of the loss are unequal, or the mask is no token."""
        yield from uneven(self, ("hidden_size", "num_heads"), ("sequence_length", "loss_chunks"))
        if self.vocab_size and self.mask_token is not None and self.mask_token >= self.vocab_size:
            yield ConfigError(
                f"model.mask_token={self.mask_token} is not in the vocabulary: tokens are below "
                f"model.vocab_size={self.vocab_size}",
                "Choose a smaller one, or leave it out.",
                ["model.mask_token", "model.vocab_size"],
            )
