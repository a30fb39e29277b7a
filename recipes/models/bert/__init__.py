"""The settings of BERT: an encoder that fills in masked tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from launcher.config.errors import ConfigError
from launcher.config.families import register
from launcher.config.fields import number
from launcher.recipes.models.sizes import TransformerOptions, dimension, feature, uneven


@register
@dataclass(frozen=True)
class BERTOptions(TransformerOptions):
    """An encoder. A size names a row of `sizes`; a field that is set beats it."""

    name: str = "bert"
    vocab_size: int = dimension(2)
    sequence_length: int = dimension()
    mlp_ratio: int = feature(4, 1)
    mask_every: int = number(7, minimum=2)
    mask_token: int | None = feature(None, 0)  # the tokenizer's, or the last token
    loss_chunks: int = number(1, minimum=1)

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
