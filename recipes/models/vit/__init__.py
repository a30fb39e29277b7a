"""The settings of a Vision Transformer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.config.errors import ConfigError
from launcher.config.families import register
from launcher.config.fields import number
from launcher.recipes.models.sizes import TransformerOptions, dimension, feature, uneven


@register
@dataclass(frozen=True)
class ViTOptions(TransformerOptions):
    """An encoder of pictures. A size names a row of `sizes`; a field that is set beats it."""

    name: str = "vit"
    image_size: int = dimension()
    channels: int = feature(3, 1)
    num_classes: int = dimension(2)
    patch_size: int = dimension()
    mlp_ratio: int = number(4, minimum=1)

    @property
    def attention_length(self) -> int:
        """The positions that see one another: the patches, and one for the class."""
        return (self.image_size // self.patch_size) ** 2 + 1

    def check(self) -> Iterator[ConfigError]:
        """Yield an error where heads or patches cannot be equal."""
        yield from uneven(self, ("hidden_size", "num_heads"), ("image_size", "patch_size"))
