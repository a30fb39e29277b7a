"""The settings of made-up data."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.families import DatasetOptions, register
from launcher.config.fields import Switch, choice, number


@register
@dataclass(frozen=True)
class Synthetic(DatasetOptions):
    """Made-up data in the model's own shapes, the same on every machine."""

    name: str = "synthetic"
    num_samples: int = number(4096, minimum=1)
    # What follows from the inputs, for a model of vectors: a random network | Wx + b + noise |
    # nothing.
    targets: str = choice("network", "network", "linear", "noise")

    switches = (
        Switch(
            ("dataset.targets",),
            ("model.name",),
            lambda config: not any(hasattr(config.model, n) for n in ("vocab_size", "image_size")),
            "the model takes tokens or pictures, which determine their targets",
            "choose a model of vectors, such as model=mlp",
        ),
    )
