"""The settings of a ResNet, wide or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from launcher.config.families import register
from launcher.config.fields import number
from launcher.recipes.models.sizes import SizedOptions

_DIMENSIONS = ("depth", "width", "image_size", "num_classes")
_FEATURES = {"width_factor": 1, "channels": 3}
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
    size: str | None = "nano"
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    image_size: int | None = number(None, minimum=1)
    channels: int | None = number(None, minimum=1)
    num_classes: int | None = number(None, minimum=2)
    depth: int | None = field(default=None, metadata={"choices": tuple(BLOCKS)})
    width: int | None = number(None, minimum=1)
    width_factor: int | None = number(None, minimum=1)
    momentum: float = number(0.9, minimum=0.0, maximum=1.0)

    dimensions: ClassVar[tuple[str, ...]] = _DIMENSIONS
    features: ClassVar = _FEATURES

    @property
    def layers(self) -> int:
        """The number of pipeline layers: one more than the model's marks."""
        assert self.depth is not None, "the size has not been filled in"
        return sum(BLOCKS[self.depth])

    @property
    def has_bottlenecks(self) -> bool:
        """Whether a block has three convolutions; one that has not has two."""
        assert self.depth is not None, "the size has not been filled in"
        return self.depth == 2 + 3 * self.layers
