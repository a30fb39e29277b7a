"""The settings of scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.config.errors import ConfigError
from launcher.config.families import DatasetOptions, ModelOptions, register
from launcher.config.fields import number

CLASSES, SIDE = 10, 8


@register
@dataclass(frozen=True)
class Digits(DatasetOptions):
    """1,797 handwritten digits of 8 x 8 grey points, which scikit-learn ships."""

    name: str = "digits"
    validation_fraction: float = number(0.1, minimum=0.0, maximum=0.9)

    def check(self, model: ModelOptions) -> Iterator[ConfigError]:
        """Yield an error for a model that takes text."""
        if hasattr(model, "vocab_size"):
            yield ConfigError(
                f"model={model.name} cannot learn from dataset=digits: it takes text, not pictures",
                "Use a model of pictures, or model=mlp.",
                ["model.name", "dataset.name"],
            )
