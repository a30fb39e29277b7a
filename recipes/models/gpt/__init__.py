"""The settings of a GPT. Its size is a row of dimensions, which fills those that are not set."""

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
class GPTOptions(TransformerOptions):
    """A decoder-only transformer. A size names a row of `sizes`; a field that is set beats it.

    Once a configuration is loaded every dimension is set and `sizes` is empty.
    """

    name: str = "gpt"
    vocab_size: int = dimension(2)
    sequence_length: int = dimension()
    mlp_ratio: int = feature(4, 1)
    dropout: float = number(0.0, minimum=0.0, maximum=1.0)
    tie_embeddings: bool = feature(True)
    loss_chunks: int = number(1, minimum=1)

    keeps_documents: ClassVar[bool] = True

    def check(self) -> Iterator[ConfigError]:
        """Yield an error where heads, or parts of the loss, cannot be equal."""
        yield from uneven(self, ("hidden_size", "num_heads"), ("sequence_length", "loss_chunks"))
