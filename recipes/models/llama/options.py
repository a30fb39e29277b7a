"""The settings of Llama and of the families that share its block: Qwen, Mistral, Gemma, MPT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from launcher.config.errors import ConfigError
from launcher.config.families import register
from launcher.config.fields import choice, number
from launcher.recipes.models.sizes import SizedOptions, uneven

_DIMENSIONS = ("vocab_size", "sequence_length", "num_layers", "num_heads", "hidden_size")
_FEATURES = {
    "num_kv_heads": None,  # as many as heads
    "head_size": None,  # hidden_size / num_heads
    "mlp_size": None,  # 8/3 of hidden_size, as in Llama 1
    "activation": "silu",
    "gated_mlp": True,
    "norm_epsilon": 1e-5,
    "rope_base": 10000.0,
    "rope_factor": 1.0,
    "sliding_window": 0,
    "qkv_bias": False,
    "head_norm": False,
    "scale_embeddings": False,
    "tie_embeddings": False,
}
_MULTIPLE = 32  # of the width of an MLP that is not given


def _feature(minimum: float | None = None, **more: Any) -> Any:
    return field(default=None, metadata={"minimum": minimum, "maximum": None, **more})


@register
@dataclass(frozen=True)
class LlamaOptions(SizedOptions):
    """A Llama. A size names a row of `sizes`; a setting that is not null beats it."""

    name: str = "llama"
    size: str | None = "nano"
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    vocab_size: int | None = number(None, minimum=2)
    sequence_length: int | None = number(None, minimum=1)
    num_layers: int | None = number(None, minimum=1, maximum=1000)
    num_heads: int | None = number(None, minimum=1)
    hidden_size: int | None = number(None, minimum=1)
    num_kv_heads: int | None = _feature(1)
    head_size: int | None = _feature(2)
    mlp_size: int | None = _feature(1)
    activation: str | None = field(default=None, metadata={"choices": ("silu", "gelu")})
    gated_mlp: bool | None = None
    norm_epsilon: float | None = _feature(0.0)
    rope_base: float | None = _feature(1.0)
    rope_factor: float | None = _feature(1.0)
    sliding_window: int | None = _feature(0)
    qkv_bias: bool | None = None
    head_norm: bool | None = None
    scale_embeddings: bool | None = None
    tie_embeddings: bool | None = None
    scan_layers: bool = False
    loss_chunks: int = number(1, minimum=1)
    attention: str = choice("auto", "auto", "xla", "cudnn")

    keeps_documents: ClassVar[bool] = True
    dimensions: ClassVar[tuple[str, ...]] = _DIMENSIONS
    features: ClassVar[Mapping[str, Any]] = _FEATURES

    def filled(self) -> Self:
        """Return the settings with all of a size's set, also those that follow from others."""
        import dataclasses

        found = super().filled()
        assert found.hidden_size is not None
        assert found.num_heads is not None
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
