"""A ResNet that is wide inside its blocks (Zagoruyko and Komodakis, 2016)."""

from launcher.recipes.models.resnet.model import build

__all__ = ["build"]
