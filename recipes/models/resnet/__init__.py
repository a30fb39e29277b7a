"""The settings of a ResNet, wide or not."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.families import register
from launcher.config.fields import number
from launcher.recipes.models.sizes import SizedOptions, dimension, feature

# Blocks of each of four groups by the depth.
BLOCKS = {
    10: (1, 1, 1, 1), 14: (1, 1, 1, 1), 18: (2, 2, 2, 2), 26: (2, 2, 2, 2), 34: (3, 4, 6, 3),
    50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3),
}  # fmt: skip


@register
@dataclass(frozen=True)
class ResNetOptions(SizedOptions):
    """A residual network. A size names a row of `sizes`; a field that is set beats it."""

    name: str = "resnet"
    image_size: int = dimension()
    channels: int = feature(3, 1)
    num_classes: int = dimension(2)
    depth: int = dimension(choices=tuple(BLOCKS))
    width: int = dimension()
    width_factor: int = feature(1, 1)
    momentum: float = number(0.9, minimum=0.0, maximum=1.0)

    @property
    def layers(self) -> int:
        """The number of pipeline layers: one more than the model's marks."""
        return sum(BLOCKS[self.depth])

    @property
    def has_bottlenecks(self) -> bool:
        """Whether a block has three convolutions; one that has not has two."""
        return self.depth == 2 + 3 * self.layers


@register
@dataclass(frozen=True)
class WideResNetOptions(ResNetOptions):
    """A ResNet with wide blocks (Zagoruyko & Komodakis, 2016); see `ResNetOptions`."""

    name: str = "wide_resnet"
