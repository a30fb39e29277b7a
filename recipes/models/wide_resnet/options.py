"""The settings of a wide ResNet."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.families import register
from launcher.recipes.models.resnet.options import ResNetOptions


@register
@dataclass(frozen=True)
class WideResNetOptions(ResNetOptions):
    """A residual network that is wide inside its blocks; see `ResNetOptions`."""

    name: str = "wide_resnet"
