"""The settings of scikit-learn's digits."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.families import DatasetOptions, register
from launcher.config.fields import number

CLASSES, SIDE = 10, 8


@register
@dataclass(frozen=True)
class Digits(DatasetOptions):
    """1,797 handwritten digits of 8 x 8 grey points, which scikit-learn ships."""

    name: str = "digits"
    holds = ("pictures", "vectors")
    validation_fraction: float = number(0.1, minimum=0.0, maximum=0.9)
