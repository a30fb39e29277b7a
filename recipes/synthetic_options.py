"""The settings of made-up data."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.families import DatasetOptions, register
from launcher.config.fields import number


@register
@dataclass(frozen=True)
class Synthetic(DatasetOptions):
    """Made-up data in the model's own shapes, the same on every machine."""

    name: str = "synthetic"
    num_samples: int = number(4096, minimum=1)
