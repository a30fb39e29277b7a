"""The settings of a dataset that is a file of arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

from launcher.config.families import DatasetOptions, register
from launcher.config.fields import number


@register
@dataclass(frozen=True, kw_only=True)
class Arrays(DatasetOptions):
    """The user's own arrays: one `.npz` file, whose arrays have a row for each sample."""

    name: str = "arrays"
    path: str
    names: list[str] = field(default_factory=list)  # empty: those that the model takes
    shuffle: bool = True
    validation_fraction: float = number(0.05, minimum=0.0, maximum=0.9)
