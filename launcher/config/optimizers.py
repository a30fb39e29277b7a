"""The settings of the section `optimizer`: a class an optimizer, with the fields that it obeys.

A part of `schema`, whose rules hold here as well. To add an optimizer, write one line as below,
with the name of Optax's transformation and the settings that become its arguments, and a file in
`conf/optimizer/`:

    optimizer("rmsprop", "scale_by_rms", eps=1e-8)

What Optax has by another name or in several parts is a function in `launcher.train.optimizer`.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, fields, make_dataclass
from typing import Any, ClassVar

from launcher.config.fields import choice, number


@dataclass(frozen=True)
class Optimizer:
    """What every optimizer obeys: its learning-rate schedule, weight decay and clipping.

    Attributes:
        scaling: the name of the transformation of gradients that makes it this optimizer.
    """

    name: str
    learning_rate: float = number(3e-3, minimum=0.0)
    warmup_steps: int = number(20, minimum=0)
    decay: str = choice("cosine", "constant", "cosine", "linear")
    final_learning_rate: float = number(0.0, minimum=0.0)
    weight_decay: float = number(0.0, minimum=0.0)
    clip_norm: float | None = number(1.0, minimum=0.0)
    scaling: ClassVar[str]

    @property
    def arguments(self) -> dict[str, Any]:
        """The settings of this optimizer alone, which its transformation takes."""
        common = {field.name for field in fields(Optimizer)}
        return {name: value for name, value in vars(self).items() if name not in common}


OPTIMIZERS: dict[str, type[Optimizer]] = {}


def optimizer(name: str, scaling: str, **settings: Any) -> type[Optimizer]:
    """Makes the class of an optimizer, and makes it known by its name.

    Args:
        name: what the settings call it.
        scaling: a function of Optax or of `launcher.train.optimizer`.
        settings: numbers by name, as defaults or as `fields.number`: other defaults of what every
            optimizer obeys, and the arguments of `scaling`.
    """
    made: list[tuple[str, type, Any]] = [("name", str, name)]
    for key, value in settings.items():
        made.append((key, float, value if isinstance(value, Field) else number(value, minimum=0.0)))
    namespace = {"scaling": scaling, "__module__": __name__}
    cls = make_dataclass(name, made, bases=(Optimizer,), frozen=True, namespace=namespace)
    OPTIMIZERS[name] = cls
    globals()[name] = cls  # where pickle finds it
    return cls


def _share(default: float) -> Any:
    return number(default, minimum=0.0, maximum=1.0)


AdamW = optimizer(
    "adamw", "scale_by_adam", weight_decay=0.1, b1=_share(0.9), b2=_share(0.95), eps=1e-8
)
optimizer("adam", "scale_by_adam", b1=_share(0.9), b2=_share(0.95), eps=1e-8)
optimizer("sgd", "scale_by_momentum", learning_rate=0.1, momentum=_share(0.9))
optimizer(
    "lion", "scale_by_lion", learning_rate=3e-4, weight_decay=0.1, b1=_share(0.9), b2=_share(0.99)
)
optimizer("adafactor", "scale_by_adafactor")
