"""The settings of a Vision Transformer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from launcher.config.errors import ConfigError
from launcher.config.families import register
from launcher.config.fields import choice, number
from launcher.recipes.models.sizes import SizedOptions, uneven

_DIMENSIONS = ("num_layers", "num_heads", "hidden_size", "patch_size", "image_size", "num_classes")
_FEATURES = {"channels": 3}


@register
@dataclass(frozen=True)
class ViTOptions(SizedOptions):
    """An encoder of pictures. A size names a row of `sizes`; a field that is set beats it."""

    name: str = "vit"
    size: str | None = "nano"
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    image_size: int | None = number(None, minimum=1)
    channels: int | None = number(None, minimum=1)
    num_classes: int | None = number(None, minimum=2)
    patch_size: int | None = number(None, minimum=1)
    num_layers: int | None = number(None, minimum=1, maximum=1000)
    num_heads: int | None = number(None, minimum=1)
    hidden_size: int | None = number(None, minimum=1)
    mlp_ratio: int = number(4, minimum=1)
    scan_layers: bool = False
    attention: str = choice("auto", "auto", "xla", "cudnn")

    dimensions: ClassVar[tuple[str, ...]] = _DIMENSIONS
    features: ClassVar = _FEATURES

    @property
    def attention_length(self) -> int:
        """The positions that see one another: the patches, and one for the class."""
        assert self.image_size is not None, "the size has not been filled in"
        assert self.patch_size is not None, "the size has not been filled in"
        return (self.image_size // self.patch_size) ** 2 + 1

    def check(self) -> Iterator[ConfigError]:
        """Yield an error where heads or patches cannot be equal."""
        yield from uneven(self, ("hidden_size", "num_heads"), ("image_size", "patch_size"))
