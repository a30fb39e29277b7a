"""A ResNet that is wide inside its blocks (Zagoruyko and Komodakis, 2016)."""

from recipes.resnet import build

__all__ = ["build"]
