"""The settings of a GPT. Its size is a row of dimensions, which fills those that are not set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from launcher.config.errors import ConfigError
from launcher.config.families import register
from launcher.config.fields import choice, number
from launcher.recipes.models.sizes import SizedOptions, dimension, feature, uneven


@register
@dataclass(frozen=True)
class GPTOptions(SizedOptions):
    """A decoder-only transformer. A size names a row of `sizes`; a field that is set beats it.

    Once a configuration is loaded every dimension is set and `sizes` is empty.
    """

    name: str = "gpt"
    vocab_size: int = dimension(2)
    sequence_length: int = dimension()
    # Each is traced by itself: more than the deepest published (DeepNet, 2022) would take hours.
    num_layers: int = dimension(maximum=1000)
    num_heads: int = dimension()
    hidden_size: int = dimension()
    mlp_ratio: int = feature(4, 1)
    dropout: float = number(0.0, minimum=0.0, maximum=1.0)
    tie_embeddings: bool = feature(True)
    scan_layers: bool = False
    loss_chunks: int = number(1, minimum=1)
    attention: str = choice("auto", "auto", "xla", "cudnn")

    keeps_documents: ClassVar[bool] = True

    def check(self) -> Iterator[ConfigError]:
        """Yield an error where heads, or parts of the loss, cannot be equal."""
        yield from uneven(self, ("hidden_size", "num_heads"), ("sequence_length", "loss_chunks"))
