"""The settings of the section `optimizer`: a class an optimizer, with the fields that it obeys.

A part of `schema`, whose rules hold here as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.fields import choice, number


@dataclass(frozen=True)
class Optimizer:
    """What every Optax optimizer obeys: its learning-rate schedule, weight decay and clipping."""

    name: str
    learning_rate: float = number(3e-3, minimum=0.0)
    warmup_steps: int = number(20, minimum=0)
    decay: str = choice("cosine", "constant", "cosine", "linear")
    final_learning_rate: float = number(0.0, minimum=0.0)
    weight_decay: float = number(0.0, minimum=0.0)
    clip_norm: float | None = number(1.0, minimum=0.0)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam; its weight decay is decoupled."""

    name: str = "adam"
    b1: float = number(0.9, minimum=0.0, maximum=1.0)
    b2: float = number(0.95, minimum=0.0, maximum=1.0)
    eps: float = number(1e-8, minimum=0.0)


@dataclass(frozen=True)
class AdamW(Adam):
    """The same with weight decay by default."""

    name: str = "adamw"
    weight_decay: float = number(0.1, minimum=0.0)


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent with momentum."""

    name: str = "sgd"
    learning_rate: float = number(0.1, minimum=0.0)
    momentum: float = number(0.9, minimum=0.0, maximum=1.0)


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion, which goes by the sign of the momentum."""

    name: str = "lion"
    learning_rate: float = number(3e-4, minimum=0.0)
    weight_decay: float = number(0.1, minimum=0.0)
    b1: float = number(0.9, minimum=0.0, maximum=1.0)
    b2: float = number(0.99, minimum=0.0, maximum=1.0)


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Adafactor, which keeps rows and columns of the second moment."""

    name: str = "adafactor"


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": SGD,
    "lion": Lion,
    "adafactor": Adafactor,
}
