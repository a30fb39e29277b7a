"""The settings of a GPT. Its size is a row of dimensions, which fills those that are not set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from launcher.config.errors import ConfigError
from launcher.config.families import register
from launcher.config.fields import choice, number
from launcher.recipes.models.sizes import SizedOptions, uneven

_DIMENSIONS = ("vocab_size", "sequence_length", "num_layers", "num_heads", "hidden_size")
_FEATURES = {"mlp_ratio": 4, "tie_embeddings": True}


@register
@dataclass(frozen=True)
class GPTOptions(SizedOptions):
    """A decoder-only transformer. A size names a row of `sizes`; a field that is set beats it.

    Once a configuration is loaded every dimension is set and `sizes` is empty.
    """

    name: str = "gpt"
    size: str | None = "nano"
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    vocab_size: int | None = number(None, minimum=2)
    sequence_length: int | None = number(None, minimum=1)
    # Each is traced by itself: more than the deepest published (DeepNet, 2022) would take hours.
    num_layers: int | None = number(None, minimum=1, maximum=1000)
    num_heads: int | None = number(None, minimum=1)
    hidden_size: int | None = number(None, minimum=1)
    mlp_ratio: int | None = number(None, minimum=1)
    dropout: float = number(0.0, minimum=0.0, maximum=1.0)
    tie_embeddings: bool | None = None
    scan_layers: bool = False
    loss_chunks: int = number(1, minimum=1)
    attention: str = choice("auto", "auto", "xla", "cudnn")

    keeps_documents: ClassVar[bool] = True
    dimensions: ClassVar[tuple[str, ...]] = _DIMENSIONS
    features: ClassVar[Mapping[str, Any]] = _FEATURES

    def check(self) -> Iterator[ConfigError]:
        """Yield an error where heads, or parts of the loss, cannot be equal."""
        yield from uneven(self, ("hidden_size", "num_heads"), ("sequence_length", "loss_chunks"))
