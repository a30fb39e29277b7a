"""The settings of the toy, a small network written with Flax NNX."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.families import ModelOptions, register
from launcher.config.fields import number


@register
@dataclass(frozen=True)
class ToyOptions(ModelOptions):
    """Dense layers with batch normalization and dropout."""

    name: str = "toy"
    input_size: int = number(16, minimum=1)
    output_size: int = number(4, minimum=1)
    hidden_size: int = number(32, minimum=1)
    num_layers: int = number(4, minimum=1, maximum=1000)
    dropout: float = number(0.0, minimum=0.0, maximum=1.0)

    @property
    def layers(self) -> int:
        """The number of pipeline layers: one more than the model's marks."""
        return self.num_layers
