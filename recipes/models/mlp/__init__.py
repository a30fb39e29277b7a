"""The settings of a stack of dense layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from launcher.config.families import ModelOptions, register
from launcher.config.fields import Switch, number


@register
@dataclass(frozen=True)
class MLPOptions(ModelOptions):
    """A stack of dense layers, for regression."""

    name: str = "mlp"
    input_size: int = number(32, minimum=1)
    hidden_size: int = number(128, minimum=1)
    output_size: int = number(8, minimum=1)
    num_layers: int = number(4, minimum=1, maximum=1000)
    widths: list[int] = field(  # of each hidden layer, in their place
        default_factory=list, metadata={"minimum": 1}
    )
    output_relu: bool = False

    switches = (
        Switch(
            ("model.hidden_size", "model.num_layers"),
            ("model.widths",),
            lambda config: not config.model.widths,
            "model.widths says the layers",
            "leave out model.widths",
        ),
    )

    @property
    def layers(self) -> int:
        """The number of pipeline layers: one more than the model's marks."""
        return len(self.widths) + 1 if self.widths else self.num_layers
