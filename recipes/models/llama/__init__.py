"""The settings of Llama and of the families that share its block: Qwen, Mistral, Gemma, MPT."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from launcher.config.errors import ConfigError
from launcher.config.families import register
from launcher.config.fields import number
from launcher.recipes.models.sizes import TransformerOptions, dimension, feature, uneven

_MULTIPLE = 32  # of the width of an MLP that is not given


@register
@dataclass(frozen=True)
class LlamaOptions(TransformerOptions):
    """A Llama. A size names a row of `sizes`; a setting that is not null beats it."""

    name: str = "llama"
    vocab_size: int = dimension(2)
    sequence_length: int = dimension()
    num_kv_heads: int = feature(None, 1)  # as many as heads
    head_size: int = feature(None, 2)  # hidden_size / num_heads
    mlp_size: int = feature(None, 1)  # 8/3 of hidden_size, as in Llama 1
    activation: str = feature("silu", choices=("silu", "gelu"))
    gated_mlp: bool = feature(True)
    norm_epsilon: float = feature(1e-5, 0.0)
    rope_base: float = feature(10000.0, 1.0)
    rope_factor: float = feature(1.0, 1.0)
    sliding_window: int = feature(0, 0)
    qkv_bias: bool = feature(False)
    head_norm: bool = feature(False)
    scale_embeddings: bool = feature(False)
    tie_embeddings: bool = feature(False)
    loss_chunks: int = number(1, minimum=1)

    keeps_documents: ClassVar[bool] = True

    def filled(self) -> Self:
        """Return the settings with all of a size's set, also those that follow from others."""
        found = super().filled()
        width = -(-8 * found.hidden_size // (3 * _MULTIPLE)) * _MULTIPLE
        return dataclasses.replace(
            found,
            num_kv_heads=found.num_kv_heads or found.num_heads,
            head_size=found.head_size or max(found.hidden_size // found.num_heads, 1),
            mlp_size=found.mlp_size or width,
        )

    def check(self) -> Iterator[ConfigError]:
        """Yield an error where heads cannot share keys, or a head's halves cannot be rotated."""
        yield from uneven(self, ("num_heads", "num_kv_heads"), ("sequence_length", "loss_chunks"))
        if self.head_size and self.head_size % 2:
            yield ConfigError(
                f"model.head_size={self.head_size} is odd; rotary positions turn pairs",
                "Make it even, or model.hidden_size an even multiple of model.num_heads.",
                ["model.head_size", "model.hidden_size", "model.num_heads"],
            )
