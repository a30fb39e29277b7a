"""The section `optimizer`: a class for each optimizer, with its settings and its `check`.

To add an optimizer, write one line as below,
with the name of Optax's transformation and the settings that become its arguments, and a file in
`conf/optimizer/`:

    optimizer("rmsprop", "scale_by_rms", eps=1e-8)

What Optax has by another name or in several parts is a function in `launcher.train.optimizer`.

Patterns are those of the shell (`*` stands for anything, dots included) for a parameter's name in
the model, such as `layers_0.mlp.linear_fc1.kernel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, make_dataclass
from typing import Any, ClassVar

from launcher.config.errors import ConfigError
from launcher.config.fields import Switch, choice, number


@dataclass(frozen=True)
class Group:
    """Settings for the parameters of a pattern; null: as for the others."""

    pattern: str
    learning_rate: float | None = number(None, minimum=0.0)
    weight_decay: float | None = number(None, minimum=0.0)
    frozen: bool = False


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: their rank, scale and parameters."""

    rank: int = number(0, minimum=0)  # 0: none
    alpha: float = number(16.0, minimum=0.0)  # they are added times alpha / rank
    pattern: str = "*.linear_*.kernel"


@dataclass(frozen=True)
class Optimizer:
    """Settings of every optimizer: trained parameters, and their average.

    Attributes:
        train_only: the pattern of the parameters that learn; null: all.
        ema: the decay of an exponential moving average of the parameters; null: none is kept.
    """

    name: str
    train_only: str | None = None
    ema: float | None = number(None, minimum=0.0, maximum=1.0)
    lora: Lora = field(default_factory=Lora)
    switches: ClassVar[tuple[Switch, ...]] = (
        Switch(
            ("optimizer.lora.alpha", "optimizer.lora.pattern"),
            ("optimizer.lora.rank",),
            lambda c: c.optimizer.lora.rank > 0,
            "optimizer.lora.rank=0 makes no adapters",
            "set optimizer.lora.rank",
        ),
    )

    def check(self) -> Iterator[ConfigError]:
        """Yield the contradictions between these settings."""
        if self.ema == 1:
            yield ConfigError(
                "optimizer.ema=1 would keep the first parameters forever",
                "Use a number below 1, such as 0.999.",
            )


@dataclass(frozen=True, kw_only=True)
class CustomOptimizer(Optimizer):
    """A custom optimizer: a module with `build(options, steps)`, and its options.

    `build` returns an Optax transformation, whose updates are added to the parameters, and the
    schedule, a function from the number of updates to the learning rate, which is logged.
    """

    name: str = "custom"
    module: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scheduled(Optimizer):
    """Settings of every built-in optimizer: schedule, weight decay, clipping and groups.

    Attributes:
        scaling: the name of the transformation of gradients that makes it this optimizer.
    """

    learning_rate: float = number(3e-3, minimum=0.0)
    warmup_steps: int = number(20, minimum=0)
    decay: str = choice("cosine", "constant", "cosine", "linear", "wsd", "cosine_restarts")
    decay_fraction: float = number(0.2, minimum=0.0, maximum=1.0)
    restarts: int = number(1, minimum=1)
    final_learning_rate: float = number(0.0, minimum=0.0)
    weight_decay: float = number(0.0, minimum=0.0)
    clip_norm: float | None = number(1.0, minimum=0.0)
    groups: list[Group] = field(default_factory=list)
    scaling = ""
    switches = (
        Switch(
            ("optimizer.final_learning_rate",),
            ("optimizer.decay",),
            lambda c: c.optimizer.decay != "constant",
            "optimizer.decay=constant ends at the rate where it begins",
            "use optimizer.decay=cosine or linear",
        ),
        Switch(
            ("optimizer.decay_fraction",),
            ("optimizer.decay",),
            lambda c: c.optimizer.decay == "wsd",
            "that is the decay of optimizer.decay=wsd",
            "use that",
        ),
        Switch(
            ("optimizer.restarts",),
            ("optimizer.decay",),
            lambda c: c.optimizer.decay == "cosine_restarts",
            "there are restarts with optimizer.decay=cosine_restarts",
            "use that",
        ),
        *Optimizer.switches,
    )

    def check(self) -> Iterator[ConfigError]:
        """Yield the contradictions between these settings."""
        yield from super().check()
        if self.clip_norm == 0:
            yield ConfigError(
                "optimizer.clip_norm=0 would make every gradient zero", "Use null for no clipping."
            )
        if self.final_learning_rate > self.learning_rate:
            yield ConfigError(
                f"optimizer.final_learning_rate={self.final_learning_rate:g} is above "
                f"optimizer.learning_rate={self.learning_rate:g}",
                "The rate decays from the second to the first.",
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """The settings of this optimizer alone, which its transformation takes."""
        common = {field.name for field in fields(Scheduled)}
        return {name: value for name, value in vars(self).items() if name not in common}


OPTIMIZERS: dict[str, type[Optimizer]] = {}


def optimizer(name: str, scaling: str, **settings: Any) -> type[Scheduled]:
    """Make the class of an optimizer and register its name.

    Args:
        name: what the settings call it.
        scaling: a function of Optax or of `launcher.train.optimizer`.
        settings: numbers by name, as defaults or as `fields.number`, or a list of text: other
            defaults of what every optimizer obeys, and the arguments of `scaling`.
    """
    made: list[tuple[str, Any, Any]] = [("name", str, name)]
    for key, value in settings.items():
        if isinstance(value, list):
            made.append((key, list[str], field(default_factory=value.copy)))
        else:
            is_field = isinstance(value, Field)
            made.append((key, float, value if is_field else number(value, minimum=0.0)))
    namespace = {"scaling": scaling, "__module__": __name__}
    cls = make_dataclass(name, made, bases=(Scheduled,), frozen=True, namespace=namespace)
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
optimizer(
    "muon",
    "scale_by_muon",
    weight_decay=0.1,
    momentum=_share(0.95),
    adam=["*embedding*", "*output_layer*"],
    b1=_share(0.9),
    b2=_share(0.95),
    eps=1e-8,
)
OPTIMIZERS["custom"] = CustomOptimizer
