"""The settings of a U-Net."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.config.errors import ConfigError
from launcher.config.families import register
from launcher.recipes.models.sizes import SizedOptions, dimension, feature

GROUPS = 8  # of the norms


@register
@dataclass(frozen=True)
class UNetOptions(SizedOptions):
    """A network with long skips that removes noise. A size names a row of `sizes`."""

    name: str = "unet"
    image_size: int = dimension()
    channels: int = feature(3, 1)
    width: int = dimension(GROUPS)
    levels: int = dimension(maximum=10)
    blocks: int = dimension()
    time_steps: int = feature(1000, 1)

    @property
    def layers(self) -> int:
        """The number of pipeline layers: one more than the model's marks."""
        return 2 * self.levels

    def check(self) -> Iterator[ConfigError]:
        """Yield an error where pictures cannot be halved, or channels not be normed in groups."""
        if self.image_size and self.levels and self.image_size % 2 ** (self.levels - 1):
            yield ConfigError(
                f"model.image_size={self.image_size} cannot be halved "
                f"model.levels - 1 = {self.levels - 1} times",
                keys=["model.image_size", "model.levels"],
            )
        if self.width and self.width % GROUPS:
            yield ConfigError(
                f"model.width={self.width} must be a multiple of {GROUPS}, for the norms' groups",
                keys=["model.width"],
            )
