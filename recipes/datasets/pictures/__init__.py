"""The settings of pictures on disk."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.families import HOLDS_OUT, DatasetOptions, register
from launcher.config.fields import choice, number


@register
@dataclass(frozen=True, kw_only=True)
class Pictures(DatasetOptions):
    """Pictures in folders, a class each, in WebDataset's tar files, or in `.npz` files."""

    name: str = "pictures"
    holds = ("pictures",)
    path: str
    format: str = choice("folder", "folder", "tar", "npz")
    fit: str = choice("crop", "crop", "pad", "stretch")
    smallest_crop: float = number(1.0, minimum=0.01, maximum=1.0)
    flip: bool = False
    mean: float = 0.0
    std: float = number(1.0, minimum=1e-6)
    bad: str = choice("refuse", "refuse", "skip")
    validation_path: str | None = None
    validation_fraction: float = number(0.05, minimum=0.0, maximum=0.9)

    switches = (HOLDS_OUT,)
