"""The settings of a U-Net."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from launcher.config.errors import ConfigError
from launcher.config.families import register
from launcher.config.fields import number
from launcher.recipes.models.sizes import SizedOptions

_DIMENSIONS = ("image_size", "width", "levels", "blocks")
_FEATURES = {"channels": 3, "time_steps": 1000}
GROUPS = 8  # of the norms


@register
@dataclass(frozen=True)
class UNetOptions(SizedOptions):
    """A network with long skips that removes noise. A size names a row of `sizes`."""

    name: str = "unet"
    size: str | None = "nano"
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    image_size: int | None = number(None, minimum=1)
    channels: int | None = number(None, minimum=1)
    width: int | None = number(None, minimum=GROUPS)
    levels: int | None = number(None, minimum=1, maximum=10)
    blocks: int | None = number(None, minimum=1)
    time_steps: int | None = number(None, minimum=1)

    dimensions: ClassVar[tuple[str, ...]] = _DIMENSIONS
    features: ClassVar = _FEATURES

    @property
    def layers(self) -> int:
        """The number of pipeline layers: one more than the model's marks."""
        assert self.levels is not None, "the size has not been filled in"
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
